"""Tasks of `finch evaluate` for lm-eval: what each one measures, its prompts, its rows, and its results for each document.

registry.py         the table of tasks and suites
task.py             what a task is, and where its rows come from
lm_eval_tasks.py    the tasks that lm-eval has
parsers.py          letters and confidences in generated text
yaml/               lm-eval's configuration of the tasks it does not have

The other modules hold one task each.
"""
