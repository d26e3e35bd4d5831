"""A real pretrained model on real rows, with the configs as they are shipped. Skips where the data is absent."""

from pathlib import Path

import pytest
import torchtune
import yaml
from helpers.runs import run_here, run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

from finch.config.instantiate import find_config


def config_of(name, data, run):
    config = yaml.safe_load(find_config(f"stories260k/{name}").read_text())
    return {**config, "data_root": str(data), "output_dir": str(run), "device": "cpu"}


def test_stories260k_two_ranks_equal_one(shared_data, tmp_path):
    rows = ["dataset.split=train[:96]", "epochs=2"]
    two = run_ranks(2, tmp_path / "two", config_of("tofu_finch", shared_data, tmp_path / "two" / "run"), *rows)
    assert two.returncode == 0, two.output[-3000:]
    one = run_here(
        tmp_path / "one",
        config_of("tofu_finch", shared_data, tmp_path / "one" / "run"),
        "gradient_accumulation_steps=2",
        *rows,
    )
    assert one.returncode == 0, one.output
    assert len(one.column("loss")) == 12
    for name in ("loss", "ema_loss", "lr"):
        assert one.column(name) == pytest.approx(two.column(name), rel=1e-5)
    assert one.column("loss")[0] == pytest.approx(4.3, abs=0.5)  # TOFU is far from children's stories
    assert one.column("loss")[-1] < 3.6
    best = AutoModelForCausalLM.from_pretrained(two.folder / "best")
    tokenizer = AutoTokenizer.from_pretrained(two.folder / "best")
    prompt = tokenizer("What is the full name of the author born in Taipei?", return_tensors="pt")
    assert best.generate(**prompt, max_new_tokens=8, do_sample=False).shape[1] > prompt.input_ids.shape[1]


def test_stories260k_sft_equals_the_stock_recipe(shared_data, tmp_path):
    config = config_of("tofu_sft", shared_data, tmp_path / "run")
    config.update(batch_size=16, epochs=1)
    config["dataset"]["split"] = "train[:160]"
    config.pop("dataset_validation")
    run = run_here(tmp_path / "finch", config)
    assert run.returncode == 0, run.output
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(tmp_path)}
    stock = {**config, "output_dir": str(tmp_path / "stock"), "metric_logger": {**logger, "filename": "stock.txt"}}
    stock |= {"optimizer_in_bwd": False, "compile": False}
    recipe = Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_single_device.py"
    done = run_ranks(1, tmp_path / "torchtune", stock, recipe=str(recipe))
    assert done.returncode == 0, done.output[-3000:]
    lines = [line for line in (tmp_path / "stock.txt").read_text().splitlines() if "loss:" in line]
    stock_losses = [float(line.split("loss:")[1].split()[0]) for line in lines]
    assert len(stock_losses) == 10
    assert run.column("loss") == pytest.approx(stock_losses, rel=5e-6)
