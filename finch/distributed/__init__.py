"""Ranks and devices: process group and mesh, FSDP2, tensor parallelism, precision, the watchdog for hung collectives, signals, and what
becomes of a process when its parent ends.

May import config and what is below it. Knows nothing of data, checkpoints or the training step; must not import checkpoint, models,
data, weights or training.
"""
