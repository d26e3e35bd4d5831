"""A real model: each choice's log-likelihood equals an independent loop over sequences."""

import re

import pytest
import torch
from helpers.evaluation import read_lines
from helpers.runs import finch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROWS = 10


def hellaswag_requests(row):
    def clean(text):
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    *sentences, rest = re.split(r"(?<=[.!?]) ", row["ctx"])
    rest = rest if sentences and rest[-1] not in ".!?" else ""
    start = row["ctx"].removesuffix(rest).strip()
    query = clean(f"{row['activity_label']}: {start} {rest.capitalize()}")
    return [(query, " " + clean(ending)) for ending in row["endings"]]


def winogrande_requests(row):
    before, after = row["sentence"].split("_")
    return [(before + option, " " + after.strip()) for option in (row["option1"], row["option2"])]


@torch.no_grad()
def log_likelihood(model, tokenizer, context, continuation):
    """Of the continuation, in nats."""
    context, space = context.rstrip(), " " * (len(context) - len(context.rstrip()))
    length = len(tokenizer.encode(context))
    tokens = torch.tensor(tokenizer.encode(context + space + continuation))
    log_probabilities = model(tokens[None]).logits[0].float().log_softmax(-1)
    return log_probabilities[length - 1 : -1].gather(1, tokens[length:, None]).sum().item()


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
