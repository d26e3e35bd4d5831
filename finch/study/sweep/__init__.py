"""Grids of runs: methods x learning rates x batch sizes x seeds, trained, evaluated and compared.

Runs and evaluations are separate processes.
"""
