"""Probes: small sets of rows that show what a model forgets while it learns. Their settings and rows, the pretrained model's own answers,
when they are evaluated and what is measured, and a budget for what one of them may lose.

May import training and what is below it; must not import cli.
"""
