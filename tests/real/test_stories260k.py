"""A real pretrained model on real rows, with the configs as they are shipped. Skips where the data is absent."""

import pytest
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
