"""Probes: small sets of rows that show what a model forgets while it learns, and a budget for what one of them may lose."""
