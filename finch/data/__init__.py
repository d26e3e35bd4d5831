"""Datasets, their order and their collation."""
