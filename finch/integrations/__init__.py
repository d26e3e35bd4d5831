"""FINCH in training loops of other libraries: ``transformers`` (TRL's trainers as well) and ``lightning``, one module per library.

``step_loss``, for Accelerate and for your own loops, sums loss and target tokens over micro-batches and ranks. ``objective_loss`` has the
objectives as a loss of transformers' Trainer, and reads losses from the outputs of its models. Both need only torch.

May import errors, extras, files, log, optim and objectives; must not import anything above, nor torchtune.
"""
