"""The state a run resumes from, RUN/checkpoints/step_N/. The Hugging Face folders that a user takes away are written by finch.weights.

May import distributed and what is below it; must not import models, data, weights or training.
"""
