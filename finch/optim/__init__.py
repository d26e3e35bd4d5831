"""Learning-rate schedules and optimizers, without torchtune.

``finch_lr`` is FINCH and what all schedules share, ``replay_lr`` the replay of a logged schedule, ``torch_lr`` torch's schedulers and
the baselines' cosine behind the same interface. ``optimizers`` runs the step inside the backward and adapts torchao's optimizers.

Needs only torch, so that any training loop can use it. May import errors, dtensor and run_files; must not import
objectives, config or anything above.
"""
