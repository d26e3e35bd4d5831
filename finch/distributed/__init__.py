"""Ranks and devices: process group, mesh, FSDP2, tensor parallelism, precision, watchdog, signals, and processes that end with their parent.

May import config and what is below it. Knows nothing of data, checkpoints or the training step; must not import checkpoint, models,
data, weights or training.
"""
