"""FINCH in training loops of other libraries, one module a library: ``transformers`` (TRL's trainers as well) and ``lightning``.

``step_loss`` is for Accelerate and for loops of your own: it sums loss and target tokens over micro-batches and ranks, and needs torch
alone, as does ``objective_loss``, the objectives as a loss of transformers' Trainer. ``causal_lm`` reads losses from the outputs of
models, ``dataset_loss`` is the pass over the training rows ahead of the first step.

May import errors, extras, files, log, optim and objectives; must not import anything above, nor torchtune.
"""
