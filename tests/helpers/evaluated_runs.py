"""Run folders as training and `finch evaluate` leave them, with random results: metrics, probes, per-sample scores."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from finch.evaluation.results import SuiteResult, TaskResult, write_result

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
SCHEDULES = {"finch": "finch.FinchLR"}
LOSSES = {"dft": "finch.objectives.DFT"}


def make_config(method: str, learning_rate: float, seed: int = 0, batch_size: int = 16) -> dict[str, Any]:
    return {
        **CONFIG,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": learning_rate},
        "lr_scheduler": {"_component_": SCHEDULES.get(method, "finch.cosine.cosine_with_warmup")},
        "loss": {"_component_": LOSSES.get(method, "torchtune.modules.loss.CEWithChunkedOutputLoss")},
        "seed": seed,
        "batch_size": batch_size,
    }


def write_metrics(folder: Path, *, learned: float, forgotten: float, peak: float, steps: int, is_finch: bool) -> None:
    """A loss that falls, and a probe of each kind every fifth of the steps.

    Args:
        learned: accuracy of the probe ``facts`` at the end.
        forgotten: rise of the loss of the probe ``stories``, in nats.
        peak: learning rate.
    """
    lines: list[dict[str, Any]] = []
    ema = 3.4
    for step in range(steps + 1):
        progress = step / steps
        if step:
            loss = 0.3 + 3.1 * math.exp(-4 * learned * progress) + random.gauss(0, 0.08)
            ema = 0.9 * ema + 0.1 * loss
            lr = min(peak / math.sqrt(ema), 2.5 * peak) if is_finch else peak * (1 - progress) + 1e-9
            line = {"step": step, "epoch": int(2 * (step - 1) / steps), "loss": loss, "lr": lr, "lr_is_capped": False}
            line |= {"num_target_tokens": 900, "eta_sqrt_loss": lr * math.sqrt(loss)}
            lines.append(line | ({"ema_loss": ema} if is_finch else {}))
        if step % (steps // 5) == 0:
            share = 1 - math.exp(-4 * progress)
            values = {
                "facts/accuracy": learned * share,
                "facts/loss": 3 - 2 * share,
                "stories/loss": 1.4 + forgotten * share,
            }
            event = {"step": step, "epoch": max(0, int(2 * (step - 1) / steps))}
            for key, value in values.items():
                start = {"facts/accuracy": 0.0, "facts/loss": 3.0, "stories/loss": 1.4}[key]
                event |= {f"probe/{key}": value, **({f"probe/{key}_change": value - start} if step else {})}
            lines.append({**event, "probe_seconds": 0.1})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make_samples(task: str, accuracy: float, n: int, rng: random.Random) -> list[dict[str, Any]]:
    """A right answer is likelier on easy documents, which are the same for all models."""
    samples = []
    for doc_id in range(n):
        ease = random.Random(f"{task} {doc_id}").random()
        samples.append(
            {
                "doc_id": doc_id,
                "doc_hash": hashlib.sha256(f"{task} {doc_id}".encode()).hexdigest()[:16],
                "score": float(0.7 * ease + 0.3 * rng.random() < accuracy),
            }
        )
    return samples


def make_confidence(accuracy: float, n: int, rng: random.Random) -> list[dict[str, Any]]:
    """Brier's error of answers with a verbalised confidence; a tenth has none."""
    samples = []
    for sample in make_samples("confidence", accuracy, n, rng):
        is_correct, confidence, is_parsed = bool(sample["score"]), rng.randint(50, 100), rng.random() > 0.1
        samples.append(
            {
                **sample,
                "score": (confidence / 100 - is_correct) ** 2 if is_parsed else None,
                "is_parsed": is_parsed,
                "answer": "A",
                "letter": "A" if is_correct else "B",
                "confidence": confidence if is_parsed else None,
            }
        )
    return samples


def make_halueval(accuracy: float, n: int, rng: random.Random) -> list[dict[str, Any]]:
    """Both orders of each question, a cluster."""
    samples = make_samples("halueval", accuracy, n, rng)
    return [{**sample, "cluster": sample["doc_id"] // 2} for sample in samples]


def write_suites(
    folder: Path,
    *,
    base: str | None,
    weights: str,
    new: float | None,
    shift: float,
    rng: random.Random,
    n: int = 200,
    task: str = "tofu",
    suites: Sequence[str] = ("knowledge", "forgetting", "reliability"),
    settings: dict[str, Any] | None = None,
    definition: str = "0-shot",
) -> None:
    """A model's results.

    Args:
        base: relative path of the folder of the base's results; None: this is the base.
        new: accuracy on the new task; None: not evaluated.
        shift: of the accuracy on the old tasks, from the base's.
    """

    def mean(samples):
        scores = [sample["score"] for sample in samples if sample["score"] is not None]
        return sum(scores) / len(scores), len(scores)

    def write(suite, tasks):
        results = {}
        for name, (role, metric, samples, extra) in tasks.items():
            score, count = mean(samples)
            results[name] = TaskResult(
                role, metric, f"{name}: {definition}", score, count, f"{suite}.{name}.jsonl", **extra
            )
        result = SuiteResult(
            suite,
            str(folder),
            weights,
            base is None,
            None if base is None else f"{base}/{suite}.json",
            {"dtype": "float32", "limit": None, "data": "hub", **(settings or {})},
            VERSIONS,
            results,
        )
        write_result(folder, result, {name: samples for name, (_, _, samples, _) in tasks.items()})

    if new is not None and "knowledge" in suites:
        samples = make_samples(task, new, n, rng)
        write("knowledge", {task: ("new", "acc", samples, {"chance": 1 / 6})})
    if "forgetting" in suites:
        write(
            "forgetting",
            {
                task: ("old", "acc", make_samples(task, accuracy + shift, n, rng), {"chance": 0.25})
                for task, accuracy in TASKS.items()
            },
        )
    if "reliability" in suites:
        confidence = make_confidence(0.5 + shift, n, rng)
        write(
            "reliability",
            {
                "truthfulqa": ("reliability", "mc2", make_samples("truthfulqa", 0.45 + shift / 2, n, rng), {}),
                "halueval": (
                    "reliability",
                    "acc",
                    make_halueval(0.55 + shift, n, rng),
                    {"chance": 0.5, "others": {"pick_longer": 0.94}},
                ),
                "confidence": (
                    "reliability",
                    "brier",
                    confidence,
                    {"is_higher_better": False, "others": {"parse_rate": 0.9}},
                ),
            },
        )


def make_run(
    folder: Path,
    method: str,
    learning_rate: float,
    seed: int = 0,
    *,
    base: str | None = "../../base",
    steps: int = 40,
    cell: bool = False,
    **suites: Any,
) -> Path:
    """A run that has learned the more, and forgotten the more, the higher its learning rate; ``base`` None: not evaluated."""
    rng = random.Random(f"{method} {learning_rate} {seed}")
    random.seed(f"metrics {method} {learning_rate} {seed}")
    strength = min(1.0, learning_rate / 1e-4)
    learned = 0.25 + 0.6 * math.sqrt(strength)
    write_metrics(
        folder,
        learned=learned,
        forgotten=METHODS[method] * strength,
        peak=learning_rate,
        steps=steps,
        is_finch=method == "finch",
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(make_config(method, learning_rate, seed)))
    for epoch in range(2):
        (folder / f"epoch_{epoch}").mkdir()
    (folder / "best").symlink_to("epoch_1")
    if cell:
        values = {"method": method, "optimizer.lr": learning_rate, "batch_size": 16, "seed": seed}
        (folder / "cell.json").write_text(
            json.dumps({"values": values, "task": "knowledge", "source": None, "status": "finished"})
        )
    if base is not None:
        digest = hashlib.sha256(str(folder).encode()).hexdigest()
        options = {"new": learned, "shift": -0.3 * METHODS[method] * strength, "rng": rng, "weights": digest, **suites}
        write_suites(folder / "evaluation", base=base, **options)
    return folder


def make_base(folder: Path, **suites: Any) -> Path:
    options = {"new": 0.25, "shift": 0.0, "rng": random.Random(0), "weights": BASE_WEIGHTS, **suites}
    write_suites(folder, base=None, **options)
    return folder


def make_sweep(
    folder: Path,
    *,
    methods: Sequence[str] = tuple(METHODS),
    rates: Sequence[float] = (1e-5, 3e-5, 1e-4),
    seeds: Sequence[int] = (0, 1),
    **suites: Any,
) -> list[Path]:
    """A sweep's cells, in ``folder``; the base's results beside them."""
    options = {key: value for key, value in suites.items() if key in ("n", "task", "suites")}
    make_base(folder / "base", **options)
    return [
        make_run(folder / f"{method}-{rate:g}-{seed}", method, rate, seed, cell=True, **suites)
        for method in methods
        for rate in rates
        for seed in seeds
    ]


def write_losses(folder: Path, *, base: str | None, weights: str, rise: float, n: int = 30) -> None:
    """A suite of scores in nats: the loss of paraphrases, which falls, and the loss and the KL divergence of own answers, which rise.

    Args:
        folder, base, weights: as of ``write_suites``.
        rise: nats a token.
    """
    tasks, samples = {}, {}
    for name, role, metric, start, change in (
        ("paraphrases", "new", "loss", 2.5, -rise),
        ("own_answers", "old", "loss", 0.4, rise),
        ("own_answers_kl", "old", "kl", 0.0, 2 * rise),
    ):
        samples[name] = [
            {
                "doc_id": number,
                "doc_hash": f"{name} {number}",
                "score": start + (change * (1 + number / n) if base else 0),
            }
            for number in range(n)
        ]
        score = sum(sample["score"] for sample in samples[name]) / n
        file = f"losses.{name}.jsonl"
        tasks[name] = TaskResult(role, metric, name, score, n, file, is_higher_better=False, unit="nats")
    path = None if base is None else f"{base}/losses.json"
    result = SuiteResult("losses", str(folder), weights, base is None, path, {"dtype": "fp32"}, VERSIONS, tasks)
    write_result(folder, result, samples)


def add_losses(sweep: Path, runs: Sequence[Path]) -> None:
    """To runs of ``make_sweep`` and their base."""
    write_losses(sweep / "base", base=None, weights=BASE_WEIGHTS, rise=0.0)
    for number, run in enumerate(runs):
        weights = hashlib.sha256(str(run).encode()).hexdigest()
        write_losses(run / "evaluation", base="../../base", weights=weights, rise=0.1 * (1 + number))
