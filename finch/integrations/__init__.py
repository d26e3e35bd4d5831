"""FINCH in training loops of other libraries: ``transformers`` (TRL's trainers as well) and ``lightning``, one module per library.

``step_loss``, for Accelerate and for your own loops, and ``objective_loss``, for transformers' models, need only torch.
"""
