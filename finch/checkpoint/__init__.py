"""The state a run resumes from, RUN/checkpoints/step_N/: writing it, the manifest that detects damage, finding and reading it, random
states. What a user takes away, the Hugging Face folders, is written by finch.weights.

May import distributed and what is below it; must not import models, data, weights or training.
"""
