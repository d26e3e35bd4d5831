"""Ranks and devices: process group, mesh, FSDP2, tensor parallelism, precision, watchdog, signals, and processes that end with their parent."""
