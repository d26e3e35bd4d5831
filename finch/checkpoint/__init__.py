"""The state a run resumes from, RUN/checkpoints/step_N/. The Hugging Face folders that a user takes away are written by finch.weights."""
