"""Learning-rate schedules and optimizers, without torchtune.

``finch_lr`` is FINCH, ``replay_lr`` the replay of a logged schedule, ``torch_lr`` torch's schedulers behind the same
interface, ``cosine`` the baselines' schedule. ``param_groups`` and ``nonfinite`` are what they share. ``in_backward`` runs
the optimizer step inside the backward, ``stochastic_rounding`` adapts torchao's optimizers.

Needs torch alone, so that any training loop can use it. May import errors, dtensor and run_files; must not import
objectives, config or anything above.
"""
