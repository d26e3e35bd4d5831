"""The loss of long batches over a large vocabulary: memory by objective, and one pass over chunks against recomputed logits."""
