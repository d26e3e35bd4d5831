"""Run folders as training and `finch evaluate` leave them, with random results: metrics, probes, per-sample scores."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from finch.evaluation.results import SuiteResult, TaskResult, write_result
from helpers.rows import write_lines

METHODS = {"sft": 1.0, "finch": 0.25, "dft": 0.5}
"""Method to how much it forgets for what it learns."""
TASKS = {"hellaswag": 0.62, "winogrande": 0.58, "mmlu": 0.55, "ifeval": 0.5}
"""Old task to the base's accuracy."""
BASE_WEIGHTS = "0123456789abcdef" * 4
VERSIONS = {"finch": "0.1.0", "lm_eval": "0.4.13", "torch": "2.13.0", "transformers": "5.23.0"}
CONFIG = {
    "model": {"_component_": "torchtune.models.llama2.llama2", "num_layers": 5},
    "checkpointer": {"checkpoint_dir": "stories260k"},
    "dataset": {"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": "tofu.jsonl"},
    "probes": {"facts": {"data_files": "facts.jsonl", "task": True}, "stories": {"data_files": "stories.jsonl"}},
    "gradient_accumulation_steps": 1,
    "epochs": 2,
    "dtype": "fp32",
}


def make_config(method: str, learning_rate: float, seed: int = 0) -> dict[str, Any]:
    schedule = "finch.FinchLR" if method == "finch" else "finch.cosine.cosine_with_warmup"
    loss = "finch.objectives.DFT" if method == "dft" else "torchtune.modules.loss.CEWithChunkedOutputLoss"
    return {
        **CONFIG,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": learning_rate},
        "lr_scheduler": {"_component_": schedule},
        "loss": {"_component_": loss},
        "seed": seed,
        "batch_size": 16,
    }


def write_metrics(folder: Path, *, learned: float, forgotten: float, peak: float, steps: int, is_finch: bool) -> None:
    """A loss that falls, and a probe of each kind every fifth of the steps.

    Args:
        learned: accuracy of the probe ``facts`` at the end.
        forgotten: rise of the loss of the probe ``stories``, in nats.
        peak: learning rate.
    """
    lines: list[dict[str, Any]] = []
    probes = {"facts/accuracy": (0.0, learned), "facts/loss": (3.0, -2.0), "stories/loss": (1.4, forgotten)}
    probes["own/kl"] = (0.0, forgotten)
    ema = 3.4
    for step in range(steps + 1):
        progress, epoch = step / steps, max(0, int(2 * (step - 1) / steps))
        if step:
            loss = 0.3 + 3.1 * math.exp(-4 * learned * progress) + random.gauss(0, 0.08)
            ema = 0.9 * ema + 0.1 * loss
            lr = min(peak / math.sqrt(ema), 2.5 * peak) if is_finch else peak * (1 - progress) + 1e-9
            line = {"step": step, "epoch": epoch, "loss": loss, "lr": lr, "lr_is_capped": False}
            line |= {"num_target_tokens": 900, "eta_sqrt_loss": lr * math.sqrt(loss)}
            lines.append(line | ({"ema_loss": ema} if is_finch else {}))
        if step % (steps // 5) == 0:
            event = {"step": step, "epoch": epoch, "probe_seconds": 0.1}
            for key, (start, change) in probes.items():
                change *= 1 - math.exp(-4 * progress)
                event |= {f"probe/{key}": start + change, **({f"probe/{key}_change": change} if step else {})}
            lines.append(event)
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "metrics.jsonl", *lines)


def make_samples(task: str, accuracy: float, n: int, rng: random.Random) -> list[dict[str, Any]]:
    """A right answer is likelier on easy documents, which are the same for all models."""
    names = [f"{task} {number}" for number in range(n)]
    scores = [float(0.7 * random.Random(name).random() + 0.3 * rng.random() < accuracy) for name in names]
    return [
        {"doc_id": number, "doc_hash": name, "score": score}
        for number, (name, score) in enumerate(zip(names, scores, strict=True))
    ]


def make_confidence(accuracy: float, n: int, rng: random.Random) -> list[dict[str, Any]]:
    """Brier's error of answers with a verbalised confidence; a tenth has none."""
    samples = make_samples("confidence", accuracy, n, rng)
    for sample in samples:
        is_correct, confidence, is_parsed = bool(sample["score"]), rng.randint(50, 100), rng.random() > 0.1
        sample |= {"is_parsed": is_parsed, "answer": "A", "letter": "A" if is_correct else "B"}
        sample["score"] = (confidence / 100 - is_correct) ** 2 if is_parsed else None
        sample["confidence"] = confidence if is_parsed else None
    return samples


def write_suite(
    folder: Path,
    suite: str,
    *,
    base: str | None,
    weights: str,
    tasks: dict[str, tuple[str, str, list[dict[str, Any]], dict[str, Any]]],
    settings: dict[str, Any] | None = None,
    definition: str = "0-shot",
) -> None:
    """
    Args:
        base: relative path of the folder of the base's results; None: this is the base.
        tasks: from a name to role, metric, samples and further fields of a result.
    """
    results = {}
    for name, (role, metric, samples, more) in tasks.items():
        scores = [sample["score"] for sample in samples if sample["score"] is not None]
        file = f"{suite}.{name}.jsonl"
        mean = sum(scores) / len(scores)
        results[name] = TaskResult(role, metric, f"{name}: {definition}", mean, len(scores), file, **more)
    path = None if base is None else f"{base}/{suite}.json"
    settings = {"dtype": "float32", "limit": None, "data": "hub", **(settings or {})}
    best = folder.parent / "best"
    model = best.resolve() if best.is_symlink() else folder
    result = SuiteResult(suite, str(model), weights, base is None, path, settings, VERSIONS, results)
    write_result(folder, result, {name: samples for name, (_, _, samples, _) in tasks.items()})


def write_suites(
    folder: Path,
    *,
    new: float,
    shift: float,
    rng: random.Random,
    n: int = 200,
    task: str = "tofu",
    suites: Sequence[str] = ("knowledge", "forgetting", "reliability"),
    **options: Any,
) -> None:
    """A model's results.

    Args:
        new: accuracy on the new task.
        shift: of the accuracy on the old tasks, from the base's.
        options: of ``write_suite``.
    """
    if "knowledge" in suites:
        tasks = {task: ("new", "acc", make_samples(task, new, n, rng), {"chance": 1 / 6})}
        write_suite(folder, "knowledge", tasks=tasks, **options)
    if "forgetting" in suites:
        samples = {name: make_samples(name, accuracy + shift, n, rng) for name, accuracy in TASKS.items()}
        tasks = {name: ("old", "acc", rows, {"chance": 0.25}) for name, rows in samples.items()}
        write_suite(folder, "forgetting", tasks=tasks, **options)
    if "reliability" in suites:
        confidence = make_confidence(0.5 + shift, n, rng)
        truthfulqa = make_samples("truthfulqa", 0.45 + shift / 2, n, rng)
        halueval = make_samples("halueval", 0.55 + shift, n, rng)
        halueval = [{**sample, "cluster": sample["doc_id"] // 2} for sample in halueval]  # both orders of a question
        lower, parsed = {"is_higher_better": False}, {"others": {"parse_rate": 0.9}}
        tasks = {
            "truthfulqa": ("reliability", "mc2", truthfulqa, {}),
            "halueval": ("reliability", "acc", halueval, {"chance": 0.5, "others": {"pick_longer": 0.94}}),
            "confidence": ("reliability", "brier", confidence, lower | parsed),
        }
        write_suite(folder, "reliability", tasks=tasks, **options)


def make_run(
    folder: Path,
    method: str,
    learning_rate: float,
    seed: int = 0,
    *,
    base: str | None = "../../base",
    cell: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    **suites: Any,
) -> Path:
    """A run that has learned the more, and forgotten the more, the higher its learning rate.

    Args:
        base: None: not evaluated.
        cell: values of the cell.json that differ from the config's; None: no cell of a sweep.
        config: keys of config.yaml that differ from ``make_config``'s.
        suites: of ``write_suites``.
    """
    random.seed(f"metrics {method} {learning_rate} {seed}")
    strength = min(1.0, learning_rate / 1e-4)
    learned, forgotten = 0.25 + 0.6 * math.sqrt(strength), METHODS[method] * strength
    is_finch = method == "finch"
    write_metrics(folder, learned=learned, forgotten=forgotten, peak=learning_rate, steps=40, is_finch=is_finch)
    (folder / "config.yaml").write_text(yaml.safe_dump({**make_config(method, learning_rate, seed), **(config or {})}))
    for epoch in range(2):
        (folder / f"epoch_{epoch}").mkdir()
    (folder / "best").symlink_to("epoch_1")
    if cell is not None:
        values = {"method": method, "optimizer.lr": learning_rate, "batch_size": 16, "seed": seed, **cell}
        content = {"values": values, "task": "knowledge", "source": None, "status": "finished"}
        (folder / "cell.json").write_text(json.dumps(content))
    if base is not None:
        rng = random.Random(f"{method} {learning_rate} {seed}")
        options = {"new": learned, "shift": -0.3 * forgotten, "rng": rng, "weights": weights_of(folder), **suites}
        write_suites(folder / "evaluation", base=base, **options)
    return folder


def weights_of(folder: Path) -> str:
    return hashlib.sha256(str(folder).encode()).hexdigest()


def make_base(folder: Path, **suites: Any) -> Path:
    options = {"new": 0.25, "shift": 0.0, "rng": random.Random(0), "weights": BASE_WEIGHTS, **suites}
    write_suites(folder, base=None, **options)
    return folder


def make_sweep(
    folder: Path,
    *,
    methods: Sequence[str] = tuple(METHODS),
    rates: Sequence[float],
    seeds: Sequence[int] = (0, 1),
    n: int,
) -> list[Path]:
    """A sweep's cells, in ``folder``; the base's results beside them."""
    make_base(folder / "base", n=n)
    cells = itertools.product(methods, rates, seeds)
    return [make_run(folder / "-".join(map(str, cell)), *cell, cell={}, n=n) for cell in cells]


def write_losses(folder: Path, *, base: str | None, weights: str, rise: float, n: int = 30) -> None:
    """A suite of scores in nats: the loss of paraphrases, which falls, and the loss and the KL divergence of own answers, which rise.

    Args:
        folder, base, weights: as of ``write_suite``.
        rise: nats a token.
    """
    tasks = {}
    for name, role, metric, start, change in (
        ("paraphrases", "new", "loss", 2.5, -rise),
        ("own_answers", "old", "loss", 0.4, rise),
        ("own_answers_kl", "old", "kl", 0.0, 2 * rise),
    ):
        samples = [
            {"doc_id": number, "doc_hash": f"{name} {number}", "score": start + change * (1 + number / n)}
            for number in range(n)
        ]
        tasks[name] = (role, metric, samples, {"is_higher_better": False, "unit": "nats"})
    write_suite(folder, "losses", base=base, weights=weights, tasks=tasks)


def add_losses(sweep: Path, runs: Sequence[Path]) -> None:
    """To runs of ``make_sweep`` and their base."""
    write_losses(sweep / "base", base=None, weights=BASE_WEIGHTS, rise=0.0)
    for number, run in enumerate(runs):
        rise = 0.1 * (1 + number)
        write_losses(run / "evaluation", base="../../base", weights=weights_of(run), rise=rise)
