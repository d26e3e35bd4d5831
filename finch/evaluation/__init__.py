"""What a model can do, measured on lm-eval: suites of tasks, their results as files, and the statistics of differences.

model_folders.py     which folders are evaluated: a model, an adapter, a run's best epoch
loading.py           processes, models, adapters and tokenizers, and their hashes
tasks/               what is measured
custom_tasks.py      lm-eval's other tasks, and a user's own
harness.py           lm-eval as a library
language_model.py    lm-eval's model: batches, answers on disk, no score from NaN
runner.py            what is left to do, one task after the other, results as files
results.py           the result files
statistics.py        differences and their intervals
judge.py             scores from a judge
chat_client.py       a server with OpenAI's protocol, its answers on disk, a budget of tokens
"""
