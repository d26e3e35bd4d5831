"""The quickstart end to end, with fewer epochs; its parts against plain torch."""

import re
import subprocess
import sys

import pytest
import torch
from helpers.runs import ROOT, environment
from transformers import AutoModelForCausalLM

from examples.quickstart import base
from examples.quickstart.__main__ import AVERAGE, FOLDERS, MEASURED
from examples.quickstart.evaluate import evaluate, tokenize
from examples.quickstart.world import new_world, old_world
from finch.base.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """`python -m examples.quickstart` in a subprocess, with two epochs instead of the configs' many."""
    folder = tmp_path_factory.mktemp("quickstart")
    short = folder / "short.py"
    short.write_text(
        "from examples.quickstart import base\n"
        "run_side_by_side = base.run_side_by_side\n"
        "base.run_side_by_side = lambda *runs: run_side_by_side(*((config, out, [*words, 'epochs=2']) for config, out, words in runs))\n"
        "import runpy, sys\n"
        f"sys.argv = ['quickstart', '--out', {str(folder / 'out')!r}]\n"
        "runpy.run_module('examples.quickstart', run_name='__main__')\n"
    )
    result = subprocess.run(
        [sys.executable, str(short)], capture_output=True, text=True, timeout=600, check=False, env=environment(ROOT)
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return folder / "out", result.stdout


def test_quickstart_prints_the_scores_of_its_runs(out):
    folder, printed = out
    batches = {"old": tokenize(old_world().about(*MEASURED), folder / "sft" / "epoch_1")}
    models = {label: folder / run / "epoch_1" for label, run in FOLDERS.items()}
    for name, model in {**models, AVERAGE: folder / "self_replay" / "average" / "model"}.items():
        scores = evaluate(model, batches)["old"]
        (line,) = [line for line in printed.splitlines() if re.match(rf"{re.escape(name)} +[\d.]+%", line)]
        assert f"{scores.loss:.3f}" in line
        assert f"{scores.accuracy:.1%}" in line
    assert str(folder / "figure.png") in printed
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_base_model_is_cached_and_loads_in_transformers(out, capsys, monkeypatch):
    folder, _ = out
    monkeypatch.setattr(base, "run_side_by_side", lambda *_: pytest.fail("trained again"))
    model = base.prepare(folder)
    assert "cached in" in capsys.readouterr().out
    assert AutoModelForCausalLM.from_pretrained(model).num_parameters() == pytest.approx(1.05e6, rel=0.05)


def test_accuracy_equals_greedy_decoding(out):
    """Generates with transformers, token by token, and compares complete answers."""
    folder, _ = out
    tuned = folder / "finch" / "epoch_1"
    batch = tokenize(new_world(), tuned)
    part = {name: tensor[:24] for name, tensor in batch.items()}
    model = AutoModelForCausalLM.from_pretrained(tuned).eval()
    num_correct = 0
    for tokens, labels in zip(part["tokens"], part["labels"], strict=True):
        targets = labels[labels != -100]
        start = int((labels != -100).nonzero()[0]) + 1
        generated = model.generate(tokens[None, :start], max_new_tokens=len(targets), do_sample=False, pad_token_id=0)
        num_correct += torch.equal(generated[0, start:], targets)
    assert evaluate(tuned, {"new": part})["new"].accuracy == pytest.approx(num_correct / 24)


def test_prepare_refuses_a_full_or_read_only_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(base, "FREE_BYTES_NEEDED", 10**18)
    with pytest.raises(UserError, match="MB free, the quickstart needs"):
        base.prepare(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        base.prepare(tmp_path / "file" / "out")


def test_error_names_the_log(tmp_path):
    with pytest.raises(UserError, match=r"run\.log ends with: .*finch: error: nothing"):
        base.run_side_by_side(("nothing", tmp_path / "run", []))
