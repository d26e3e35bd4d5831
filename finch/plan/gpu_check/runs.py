"""Phase 4: real runs of the recipe on a random model: one that is killed and resumed, its export, its probes, generation."""

from __future__ import annotations

import importlib
import math
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from finch_full_finetune import FinchFullFinetune

from finch.base import run_files
from finch.config.parser import read
from finch.plan.gpu_check.models import TINY, Model, initial_weights, random_rows, step_config, write_base, write_config
from finch.plan.gpu_check.plain_model import plain_logits, plain_step, worst_loss
from finch.plan.gpu_check.processes import Ranks
from finch.plan.gpu_check.report import Check
from finch.plan.gpu_check.step import Step
from finch.training.hooks import Hook
from finch.training.own_answers import generate
from finch.training.run import run_recipe
from finch.weights.huggingface import HuggingFaceFolder

_MODEL = TINY["Q"]
_EPOCHS, _KILLED_AFTER = 2, 8  # of 12 steps
_CUDA_LIMIT = 1e-3  # attention's backward adds in no fixed order there
_CPU_LIMIT = 1e-6  # where the number of ranks changes
_NEW_TOKENS = 12
_TIE = 1e-4  # nats between two tokens of which either may be the likeliest in fp32


class KillAfter(Hook):
    """Ends the process of one rank at once, as a machine does that runs out of memory."""

    def __init__(self, step: int, rank: int = 0) -> None:
        self._step, self._rank = step, rank

    def after_step(self, state: Any) -> None:
        if state.step == self._step and int(os.environ.get("RANK", "0")) == self._rank:
            os.kill(os.getpid(), signal.SIGKILL)


def run(check: Check) -> None:
    write_base(check.folder, _MODEL)
    for name, case in {"kill and resume": _resume, "export": _read_export, "generation": _generate}.items():
        with check.case(name):
            case(check)


def train(config: str) -> None:
    """The recipe in this process."""
    run_recipe(FinchFullFinetune, read(["--config", config]))


def job(check: Check, name: str, *, model: Model = _MODEL, ranks: int = 1, **changes: Any) -> str:
    """The config of a run of 12 steps in the phase's folder, with asynchronous saves."""
    options: dict[str, Any] = {
        "output_dir": str(check.folder / name),
        "tokenizer": {"_component_": "finch.models.auto_tokenizer", "path": str(check.folder / "base")},
        "shuffle": True,
        "checkpoint": {"every_n_steps": 3},
        "batch_size": 8 // ranks,
        "epochs": _EPOCHS,
        "device": check.device,
        "dtype": "fp32",
    }
    return write_config(check.folder, model, name, **{**options, **changes})


def kill_hook(rank: int = 0) -> dict[str, Any]:
    return {"hooks": {"kill": {"_component_": f"{__name__}.KillAfter", "step": _KILLED_AFTER, "rank": rank}}}


def compare_resumed(check: Check, name: str, *, is_exact: bool) -> None:
    """Resumes the run "killed" and compares its losses with those of "straight"."""
    train(job(check, "killed", resume_from_checkpoint=True))
    limit = _CUDA_LIMIT if check.device != "cpu" else 0.0 if is_exact else _CPU_LIMIT
    compare_losses(check, name, losses_of(check.folder / "killed"), losses_of(check.folder / "straight"), limit)


def compare_losses(check: Check, name: str, seen: list[float], expected: list[float], limit: float) -> None:
    error = worst_loss(seen, expected) if len(seen) == len(expected) else math.inf
    check.at_most(name, error, limit, note=f"losses of {len(seen)} steps")


def losses_of(run: Path) -> list[float]:
    return [line["loss"] for line in run_files.read_metrics(run / run_files.METRICS) if "loss" in line]


def _resume(check: Check) -> None:
    killed = Ranks("killed", f"{__name__}:train", {"config": job(check, "killed", **kill_hook())}, check.folder)
    rows = {"data_files": str(check.folder / "rows.jsonl"), "rows": 4}
    probes = {"texts": rows, "own": {**rows, "kind": "self", "max_new_tokens": _NEW_TOKENS}}
    train(job(check, "straight", probes=probes))
    killed.finish(check.end)
    check.equal("a run that is killed: exit code", killed.codes, [-signal.SIGKILL])
    compare_resumed(check, "killed and resumed against a run without", is_exact=True)
    lines = run_files.read_metrics(check.folder / "straight" / run_files.METRICS)
    probed = [line for line in lines if "probe/own/kl" in line]
    check.at_most("probes: KL of the model from itself before training", abs(probed[0]["probe/own/kl"]), 1e-6)
    values = [value for line in probed for key, value in line.items() if key.startswith("probe/")]
    check.equal("probes: values are finite", all(map(math.isfinite, values)), True, note=f"{len(probed)} evaluations")


def _read_export(check: Check) -> None:
    name = "export: loss by transformers against float64 in plain torch"
    if find_spec("transformers") is None:
        check.not_run(name, "transformers is not installed")
        return
    folder = check.folder / "straight" / f"epoch_{_EPOCHS - 1}"
    rows = random_rows(_MODEL.sizes["vocab_size"], 4)
    exact, _ = plain_step(_MODEL, dict(HuggingFaceFolder(str(folder)).weights()), rows, torch.float64)
    auto = importlib.import_module("transformers").AutoModelForCausalLM
    network = auto.from_pretrained(folder, dtype=torch.float32).to(check.device)
    with torch.no_grad():
        logits = [network(torch.tensor([row["tokens"]], device=check.device)).logits[0, :-1].double() for row in rows]
    labels = torch.tensor([label for row in rows for label in row["labels"][1:]])
    loss = float(torch.nn.functional.cross_entropy(torch.cat(logits).cpu(), labels))  # the mean without labels of -100
    check.at_most(name, abs(loss - exact) / exact, 1e-5, expected=exact)


def _generate(check: Check) -> None:
    """Greedy answers: each token must be the likeliest of the plain model."""
    step = Step(step_config(check.folder, _MODEL, dtype="fp32", device=check.device), _MODEL)
    prompts = [row["tokens"][:20] for row in random_rows(_MODEL.sizes["vocab_size"], 4)]
    options: dict[str, Any] = {"max_new_tokens": _NEW_TOKENS, "dtype": torch.float32, "parallel": step.parallel}
    answers = generate(step.model, prompts, torch.zeros(len(prompts), _NEW_TOKENS), 0.0, [], **options)
    wide = {name: weight.double() for name, weight in initial_weights(_MODEL).items()}
    gaps = []
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = plain_logits(_MODEL, wide, [*prompt, *answer["tokens"]], slice(len(prompt) - 1, -1))
        chosen = logits.gather(-1, torch.tensor(answer["tokens"])[:, None])[:, 0]
        gaps.append(float((logits.amax(-1) - chosen).max()))
    name = "generation: nats below the likeliest token in float64"
    check.at_most(name, float(torch.tensor(gaps).max()), _TIE, note=f"{len(prompts)} answers of {_NEW_TOKENS} tokens")
