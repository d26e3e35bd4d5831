"""Learning-rate schedules and optimizers, without torchtune: FINCH, the replay of a logged schedule, and torch's schedulers.

Needs only torch, so that any training loop can use it.
"""
