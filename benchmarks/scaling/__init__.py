"""Tokens a second of finch's recipe against the number of ranks, the length of rows, and the size of the model."""
