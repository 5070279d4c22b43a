"""Measurement of time, peak memory and multiplications."""
