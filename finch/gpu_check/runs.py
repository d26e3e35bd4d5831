"""Phase 4: real runs of the recipe on a random model: one that is killed and resumed, its export, its probes, generation."""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from finch_full_finetune import FinchFullFinetune

from finch import run_files
from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys
from finch.gpu_check.folders import run_blocks, write_base, write_rows
from finch.gpu_check.models import Model, initial_weights, models, random_rows, step_config, write_config
from finch.gpu_check.plain_model import plain_logits, plain_step
from finch.gpu_check.processes import Ranks
from finch.gpu_check.report import Check
from finch.gpu_check.step import Step
from finch.training.hooks import Hook
from finch.training.own_answers import generate
from finch.training.run import run_recipe
from finch.weights.huggingface import HuggingFaceFolder

_ROWS, _BATCH, _EPOCHS, _KILLED_AFTER = 48, 8, 2, 8  # 12 steps
_SAVES = {"checkpoint": {"every_n_steps": 3}}
_CUDA_LIMIT = 1e-3  # attention's backward adds in no fixed order there
_NEW_TOKENS = 12
_TIE = 1e-4  # nats between two tokens of which either may be the likeliest in fp32


class KillAfter(Hook):
    """Ends one rank's process as the machine would that runs out of memory."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self._step, self._rank = step, rank

    def after_step(self, state: Any) -> None:
        if state.step == self._step and int(os.environ.get("RANK", "0")) == self._rank:
            os.kill(os.getpid(), signal.SIGKILL)


def train(config: str) -> None:
    """The recipe in this process."""
    run_recipe(FinchFullFinetune, read(["--config", config], FullFinetuneKeys))


def run(check: Check) -> None:
    model = models(check.device)["Q"]
    weights = initial_weights(model)
    write_base(check.folder / "base", model, weights)
    write_rows(check.folder / "rows.jsonl", _ROWS)
    with check.case("kill and resume"):
        _kill_and_resume(check, model)
    with check.case("export"):
        _read_export(check, model)
    with check.case("generation"):
        _generate(check, model)


def blocks_of(check: Check, model: Model, name: str, **changes: Any) -> dict[str, Any]:
    options = {"device": check.device, "dtype": "fp32", "epochs": _EPOCHS, "batch_size": _BATCH, "log_level": "ERROR"}
    return run_blocks(check.folder, model, name, **{**options, **_SAVES, **changes})


def losses_of(folder: Path) -> list[float]:
    """Of each step, in order; those of the last start where a step was taken twice."""
    lines = [json.loads(line) for line in (folder / run_files.METRICS).read_text(encoding="utf-8").splitlines()]
    return list({line["step"]: line["loss"] for line in lines if "loss" in line}.values())


def compare_losses(check: Check, name: str, seen: list[float], expected: list[float], limit: float) -> None:
    """The largest relative difference; infinite where steps are missing."""
    error = math.inf
    if len(seen) == len(expected):
        error = max(abs(one - other) / other for one, other in zip(seen, expected, strict=True))
    check.at_most(name, error, limit, note=f"{len(seen)} of {len(expected)} steps")


def _kill_and_resume(check: Check, model: Model) -> None:
    hook = {"kill": {"_component_": "finch.gpu_check.runs.KillAfter", "step": _KILLED_AFTER}}
    config = write_config(check.folder, blocks_of(check, model, "killed", hooks=hook), "killed")
    killed = Ranks("killed", "finch.gpu_check.runs:train", {"config": config}, check.folder)
    probes = {
        "texts": {"data_files": str(check.folder / "rows.jsonl"), "rows": 8},
        "own": {"data_files": str(check.folder / "rows.jsonl"), "rows": 4, "kind": "self", "max_new_tokens": _NEW_TOKENS},  # fmt: skip
    }
    train(write_config(check.folder, blocks_of(check, model, "straight", probes=probes), "straight"))
    killed.wait(check.end)
    killed.kill()
    check.equal("a run that is killed: exit code", killed.codes, [-signal.SIGKILL], note=killed.last_lines(1))
    train(write_config(check.folder, blocks_of(check, model, "killed", resume_from_checkpoint=True), "resumed"))
    straight = losses_of(check.folder / "straight")
    limit = 0.0 if check.device == "cpu" else _CUDA_LIMIT
    compare_losses(check, "killed and resumed: losses against a run without", losses_of(check.folder / "killed"), straight, limit)  # fmt: skip
    check.equal("losses are finite", all(map(math.isfinite, straight)), True)
    _check_probes(check)


def _check_probes(check: Check) -> None:
    text = (check.folder / "straight" / run_files.METRICS).read_text(encoding="utf-8")
    lines = [line for line in map(json.loads, text.splitlines()) if "probe/own/kl" in line]
    check.at_most("probes: KL of the model from itself before training", abs(lines[0]["probe/own/kl"]), 1e-6)
    values = [value for line in lines for key, value in line.items() if key.startswith("probe/")]
    check.equal("probes: values are finite", all(map(math.isfinite, values)), True, note=f"{len(lines)} evaluations")


def _read_export(check: Check, model: Model) -> None:
    name = "export: loss by transformers against float64 in plain torch"
    if find_spec("transformers") is None:
        check.not_run(name, "transformers is not installed")
        return
    transformers = importlib.import_module("transformers")
    folder = check.folder / "straight" / f"epoch_{_EPOCHS - 1}"
    rows = random_rows(model.sizes["vocab_size"], 4)
    exact, _ = plain_step(model, dict(HuggingFaceFolder(str(folder)).weights()), rows, torch.float64)
    network = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(check.device)
    losses = []
    for row in rows:
        with torch.no_grad():
            logits = network(torch.tensor([row["tokens"]], device=check.device)).logits[0, :-1].double().cpu()
        labels = torch.tensor(row["labels"][1:])
        losses.append(torch.nn.functional.cross_entropy(logits, labels, reduction="none")[labels != -100])
    check.at_most(name, abs(float(torch.cat(losses).mean()) - exact) / exact, 1e-5, expected=exact)


def _generate(check: Check, model: Model) -> None:
    weights = initial_weights(model)
    step = Step(step_config(check, model, dtype="fp32"), weights, torch.device(check.device))
    prompts = [row["tokens"][:20] for row in random_rows(model.sizes["vocab_size"], 4)]
    try:
        answers = generate(
            step.model, prompts, torch.zeros(len(prompts), _NEW_TOKENS), 0.0, [], max_new_tokens=_NEW_TOKENS,
            dtype=torch.float32, parallel=step.parallel,
        )  # fmt: skip
    finally:
        step.close()
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        wide = {name: weight.double() for name, weight in weights.items()}
        tokens = [*prompt, *answer["tokens"]]
        logits = plain_logits(model, wide, tokens, slice(len(prompt) - 1, -1))
        chosen = logits.gather(-1, torch.tensor(answer["tokens"])[:, None])[:, 0]
        gaps.append(float((logits.amax(-1) - chosen).max()))
    check.at_most("generation: nats below the likeliest token in float64", max(gaps), _TIE, note=f"{len(prompts)} answers of {_NEW_TOKENS} tokens")  # fmt: skip
