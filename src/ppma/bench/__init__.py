"""Benchmarks of operators and models."""
