"""Grids of runs: methods x learning rates x batch sizes x seeds, trained, evaluated and compared.

May import everything below it, down to evaluation; report and cli use it. Runs and evaluations are separate processes.
"""
