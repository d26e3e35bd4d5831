"""Gemma 2 as Google published it, on torchtune's modules.

torchtune 0.6.1's own Gemma 2 is another function of the same weights: it soft-caps the normed hidden states where Gemma 2
caps the logits, its builders give either cap the value of the other, and its conversion from Hugging Face exchanges the
norms before and after the feed-forward. The builders and the conversion here have torchtune's names and arguments.
"""

from finch.models.gemma2.builders import gemma2, gemma2_2b, gemma2_9b, gemma2_27b
from finch.models.gemma2.head import SoftCappedTiedLinear
from finch.models.gemma2.weights import gemma2_hf_to_tune, gemma2_tune_to_hf

__all__ = [
    "SoftCappedTiedLinear",
    "gemma2",
    "gemma2_2b",
    "gemma2_9b",
    "gemma2_27b",
    "gemma2_hf_to_tune",
    "gemma2_tune_to_hf",
]
