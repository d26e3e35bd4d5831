"""Target tokens a second of finch's recipe and of other ways to do the same fine-tune, alternating in one run."""
