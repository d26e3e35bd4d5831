"""Host memory of each rank while a model is loaded and exported: `python -m benchmarks.memory`."""
