"""Greedy answers against transformers' generate, for every family of models."""

import pytest
import torch
from helpers import models

from finch.distributed.parallel import Parallel
from finch.probes.own_answers import greedy_answers
from finch.training.chunked_loss import TokenLoss

PROMPTS = [[3, 7, 11], [40, 41, 42, 43, 44, 45, 46, 47], [5], [60, 3, 9, 60, 3]]


@pytest.mark.parametrize("family", ["llama", "llama 3.2", "mistral", "qwen2", "qwen3 tied", "gemma", "gemma2", "phi3"])
def test_greedy_answers_equal_transformers(family, tmp_path):
    """Prompts of unequal lengths in batches of three; the stop tokens are two that some answers have."""
    reference = models.save(family, tmp_path)
    _, decoder = models.load(family, tmp_path)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [reference.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in PROMPTS]
    stops = {expected[0][4], expected[1][8]}
    for answer in expected:
        first = next((index for index, token in enumerate(answer) if token in stops), len(answer))
        del answer[first + 1 :]
    model, one_process = TokenLoss(decoder).train(), Parallel(torch.device("cpu"))
    options = {"stop_tokens": stops, "max_new_tokens": 12, "batch_size": 3, "dtype": torch.float32}
    assert greedy_answers(model, PROMPTS, **options, parallel=one_process) == expected
    assert min(map(len, expected)) < 12
    assert model.training
    assert not decoder.caches_are_setup()
