"""Tasks of `finch evaluate` for lm-eval: what each one measures, its prompts, its rows, and its results for each document.

registry.py     the table of tasks and suites
task.py         what a task is
manager.py      lm-eval's TaskManager for these tasks, on local files or the hub
rows.py         where rows come from
parsers.py      letters and confidences in generated text
yaml/           lm-eval's configuration of the tasks it does not have

The other modules are a task each. May import everything below cli but training, probes, sweep and report; lm-eval and the datasets
library are imported inside functions, so that the table can be read at once.
"""
