"""Learning-rate schedules and optimizers: FINCH, the replay of a logged schedule, torch's schedulers behind the same interface, what to
do about a non-finite loss, the optimizer step inside the backward, stochastic rounding.

Needs torch alone, so that any training loop can use it. May import errors, dtensor and run_files; must not import objectives, config
or anything above.
"""
