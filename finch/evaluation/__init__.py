"""What a model can do, measured on lm-eval: suites of tasks, their results as files, and the statistics of differences.

May import everything below cli but training, probes, sweep and report; sweep and report read its results.
"""
