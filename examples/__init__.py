"""Examples: the quickstart, and a notebook with FINCH in a training loop."""
