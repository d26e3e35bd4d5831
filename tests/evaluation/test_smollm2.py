"""A real model: each choice's log-likelihood equals an independent loop over sequences."""

import pytest
import torch
from helpers.evaluation import read_lines
from helpers.independent_scores import hellaswag_requests, log_likelihood, winogrande_requests
from helpers.runs import finch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = 10


@pytest.mark.slow
def test_log_likelihoods_equal_an_independent_loop(capsys, smollm2, shared_data, tmp_path):
    options = ["--base", smollm2, "--data-root", shared_data, "--out", tmp_path, "--limit", ROWS]
    code, _, err = finch(
        capsys, "evaluate", *map(str, options), "--suite", "forgetting", "--tasks", "hellaswag,winogrande"
    )
    assert code == 0, err
    [folder] = tmp_path.iterdir()
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    for task, requests in (("hellaswag", hellaswag_requests), ("winogrande", winogrande_requests)):
        rows = read_lines(shared_data / task / "validation.jsonl")[:ROWS]
        for row, sample in zip(rows, read_lines(folder / f"forgetting.{task}.jsonl"), strict=True):
            expected = [log_likelihood(model, tokenizer, *request) for request in requests(row)]
            assert sample["loglikelihoods"] == pytest.approx(expected, abs=1e-4), sample["doc_id"]
