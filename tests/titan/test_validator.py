"""Probes, validation and the forgetting budget of a TorchTitan run, against transformers on the same rows."""

from __future__ import annotations

import pytest
import torch
import transformers

from finch.models import auto_tokenizer
from finch.probes.evaluation import probe_metrics
from finch.probes.rows import read_rows
from finch.probes.settings import ProbeSettings

SEQ_LEN = 256


@pytest.fixture(scope="session")
def expected(shared_data):
    """From a Hugging Face folder to the probes' metrics under its model, by transformers."""
    tokenizer = auto_tokenizer(str(shared_data / "stories260k"), max_seq_len=SEQ_LEN)
    tofu = str(shared_data / "tofu/full.jsonl")
    settings = {
        "stories": ProbeSettings(data_files=str(shared_data / "tinystories/stories.jsonl"), rows=3),
        "answers": ProbeSettings(data_files=tofu, split="train[64:73]", rows=9),
        "endings": ProbeSettings(data_files=str(shared_data / "hellaswag/validation.jsonl"), rows=1),
    }
    probes = {name: read_rows(name, each, tokenizer, SEQ_LEN) for name, each in settings.items()}

    @torch.no_grad()
    def measure(folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        metrics = {}
        for name, rows in probes.items():
            sums = []
            for sample in rows.samples:
                logits = model(torch.tensor([sample["tokens"]])).logits[0, :-1]
                sums.append(
                    torch.nn.functional.cross_entropy(logits, torch.tensor(sample["labels"][1:]), reduction="sum")
                )
            for key, value in probe_metrics(torch.stack(sums).double(), rows).items():
                metrics[f"probe/{name}/{key}"] = value
        return metrics

    return measure


def events(run, key):
    return [line for line in run.lines() if key in line]


def test_probes_equal_transformers_before_the_first_step(one_rank, two_ranks, expected, shared_data):
    metrics = expected(shared_data / "stories260k")
    assert set(metrics) == {"probe/stories/loss", "probe/answers/loss", "probe/endings/loss", "probe/endings/accuracy"}
    for run in (one_rank["probed"], two_ranks["probed"]):
        first = events(run, "probe/stories/loss")[0]
        assert first["step"] == 0
        assert {key: first[key] for key in metrics} == pytest.approx(metrics, rel=1e-5)


def test_exported_folder_is_the_probed_model(one_rank, expected):
    run = one_rank["probed"]
    last = events(run, "probe/stories/loss")[-1]
    metrics = expected(run.folder / f"checkpoint/step-{last['step']}")
    assert {key: last[key] for key in metrics} == pytest.approx(metrics, rel=1e-5)


def test_validation_loss_is_the_mean_over_its_rows(one_rank):
    run = one_rank["probed"]
    losses = {line["step"]: line["validation_loss"] for line in events(run, "validation_loss")}
    probes = {line["step"]: line["probe/answers/loss"] for line in events(run, "probe/answers/loss") if line["step"]}
    assert losses == pytest.approx(probes, rel=1e-5)  # the probe has the same rows


def test_budget_ends_the_run(one_rank):
    run = one_rank["probed"]
    changes = [line["probe/stories/loss_change"] for line in events(run, "probe/stories/loss_change")]
    assert changes[-1] > 0.1
    assert all(change <= 0.1 for change in changes[:-1])
    last = run.column("step")[-1]
    assert last == events(run, "probe/stories/loss")[-1]["step"] < 20
    assert (run.folder / f"checkpoint/step-{last}/model.safetensors").is_file() or any(
        (run.folder / f"checkpoint/step-{last}").glob("*.safetensors")
    )
