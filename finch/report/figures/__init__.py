"""Figures of a report: each a file, in one style."""
