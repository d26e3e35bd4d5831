"""The peak memory of a real training step on the CPU against `finch estimate`."""
