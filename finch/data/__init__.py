"""Datasets and batches: from a config's ``dataset`` to micro-batches with shifted labels, their global order, statistics of the rows,
the paper's three tasks, and rows translated by a language model.

May import distributed and config and what is below them; must not import models, weights or training.
"""
