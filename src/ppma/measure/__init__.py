"""How things are measured: time in turns, peak memory, multiplications."""
