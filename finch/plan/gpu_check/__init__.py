"""`finch doctor --gpu`: whether a machine computes a training step right.

A phase is a function that runs in a process of its own and records lines: expected, seen, tolerance.
"""
