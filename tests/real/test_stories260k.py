"""A real pretrained model on real rows, with the configs as they are shipped. Skips where the data is absent."""

import json

import pytest
import torch
import yaml
from helpers.runs import finished, stock_losses
from transformers import AutoModelForCausalLM, AutoTokenizer

from finch.config.instantiate import find_config


def config_of(name, data):
    config = yaml.safe_load(find_config(f"stories260k/{name}").read_text())
    return {**config, "data_root": str(data), "device": "cpu"}


def test_stories260k_learns_tofu(shared_data, tmp_path):
    """On one rank and on two: tests/integrations/test_equality.py."""
    config = config_of("tofu_finch", shared_data)
    run = finished(tmp_path, config, "gradient_accumulation_steps=2", "dataset.split=train[:96]", "epochs=2")
    losses = run.column("loss")
    assert len(losses) == 12
    assert losses[0] == pytest.approx(4.3, abs=0.5)  # TOFU is far from children's stories
    assert losses[-1] < 3.6
    best = AutoModelForCausalLM.from_pretrained(run.folder / "best")
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "best")
    prompt = tokenizer("What is the full name of the author born in Taipei?", return_tensors="pt")
    assert best.generate(**prompt, max_new_tokens=8, do_sample=False).shape[1] > prompt.input_ids.shape[1]


def test_stories260k_sft_equals_the_stock_recipe(shared_data, tmp_path):
    config = config_of("tofu_sft", shared_data)
    config.update(batch_size=16, epochs=1)
    config["dataset"]["split"] = "train[:160]"
    config.pop("dataset_validation")
    run = finished(tmp_path, config)
    stock = stock_losses(tmp_path, {**config, "optimizer_in_bwd": False, "compile": False})
    assert len(stock) == 10
    assert run.column("loss") == pytest.approx(stock, rel=5e-6)


@pytest.mark.slow
def test_preserve_forgets_less_than_half_at_an_equal_training_loss(shared_data, tmp_path):
    """Forgotten is the rise of the loss on the stories that the model was pretrained on."""
    lines = (shared_data / "tinystories/stories.jsonl").read_text().splitlines()[:48]
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories260k")
    stories = [tokenizer(json.loads(line)["text"], return_tensors="pt").input_ids[:, :256] for line in lines]

    @torch.no_grad()
    def loss(folder):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        sums = [model(tokens, labels=tokens).loss * (tokens.shape[1] - 1) for tokens in stories]
        return float(sum(sums)) / sum(tokens.shape[1] - 1 for tokens in stories)

    config, start, found = config_of("tofu_finch", shared_data), loss(shared_data / "stories260k"), {}
    words = [
        "batch_size=16",
        "gradient_accumulation_steps=1",
        "dataset.split=train[:160]",
        "epochs=4",
    ]
    for method, rate in (("sft", 1e-3), ("preserve", 6e-4)):  # a cosine learns less than the constant of its peak
        run = finished(tmp_path / method, config, *words, f"method={method}", f"optimizer.lr={rate}")
        folder = run.folder
        found[method] = run.column("loss")[-1], loss(folder / "epoch_3") - start
    (sft, forgotten), (preserve, preserved) = found.values()
    assert preserve == pytest.approx(sft, abs=0.1)
    assert 0 < preserved < forgotten / 2
    assert 0 < loss(folder / "average/model") - start < forgotten / 4  # which has learned three quarters of it
