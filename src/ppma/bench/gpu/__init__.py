"""The GPU kernels without a running model: ahead-of-time compilation, instruction counts, predictions, timings."""
