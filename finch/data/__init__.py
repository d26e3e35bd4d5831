"""Datasets and batches: from a config's ``dataset`` to micro-batches with shifted labels, in one global order."""
