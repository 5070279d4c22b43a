"""Measurement tools: interleaved timing, peak memory, counted multiplications."""
