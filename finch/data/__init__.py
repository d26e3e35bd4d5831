"""Datasets and batches: from a config's ``dataset`` to micro-batches with shifted labels, in one global order.

May import distributed and config and what is below them; must not import models, weights or training.
"""
