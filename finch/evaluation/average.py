"""The average of a run's model with its pretrained one, theta = (1 - alpha) theta_0 + alpha theta_ft, with the alpha chosen by evaluating it.

Learned is the fall of the metric that chooses RUN/best; forgotten is what the run's first probe of old skills measures, or the KL divergence on
finch's prompts. The model is always blended from the files of both folders, tensor by tensor, and evaluated in the memory of one.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from finch.base import files, run_files
from finch.base.dtensor import local_block, to_local
from finch.base.errors import UserError
from finch.base.log import logger
from finch.config import schema
from finch.config.instantiate import build
from finch.config.resolved import map_values
from finch.config.schema import ROWS
from finch.config.validation import check
from finch.data.row_files import file_errors
from finch.data.stats import collect_stats
from finch.data.training_data import TrainingData
from finch.distributed import parallel as distributed
from finch.distributed.parallel import Parallel
from finch.distributed.precision import precision_of
from finch.evaluation.adapters import merge_folder
from finch.evaluation.choice import Choice
from finch.evaluation.foreign import offline, read_config_of
from finch.evaluation.model_folders import TUNED, check_pretrained, manifest_digest, relative_to
from finch.evaluation.results import MEASURED
from finch.evaluation.wise_ft import blend, wise_ft
from finch.probes.evaluation import evaluate
from finch.probes.kinds import read_rows
from finch.probes.probes import own_answers, read_probes, selection_key
from finch.training.checkpointer import TrainState
from finch.training.hooks import Hook, Trainer
from finch.training.loaded_model import LoadedModel
from finch.training.reference import dataset_loss, fingerprint_of, model_settings
from finch.training.run import RunLock
from finch.training.style import COLOURS, LESS_FORGOTTEN, MORE_LEARNED, new_panels
from finch.weights.files import check_export, is_own
from finch.weights.formats import open_checkpoint
from finch.weights.huggingface import HuggingFaceFolder

MAX_EVALUATIONS = 6
_MAX_TRAINING_ROWS = 128
_FAIR_EXPONENT = 1.3
"""Of forgetting ~ alpha^p; below it half of the way forgets more than 0.4 of the whole: the rate was too high for averages to help."""
_EVERYDAY, _MERGED = "everyday", "merged"
UNUSED = (
    *("optimizer", "lr_scheduler", "regularizer", "kl_penalty", "self_replay", "metric_logger", "hooks", "profiler"),
    *("average", "tensor_parallel_plan"),
)
_ONE_PROCESS: dict[str, Any] = {
    "tensor_parallel_dim": 1,
    "data_parallel_replicate_dim": 1,
    "data_parallel_shard_dim": -1,
}
_ONE_PROCESS |= {"compile": False, "fsdp_cpu_offload": False, "num_workers": 0}
_ONE_PROCESS |= {"optimizer": {"_component_": "torch.optim.AdamW"}}


@dataclass(frozen=True)
class Point:
    """What an average has learned and forgotten; ``learned`` is a loss or minus an accuracy, lower is better."""

    alpha: float
    learned: float
    forgotten: float


class Front:
    """The averages of a run, evaluated where they are asked for and at most once; kept in a file, so that an interrupted search goes on.

    Attributes:
        points: by alpha.
    """

    def __init__(
        self, file: Path, fingerprint: str, evaluate: Callable[[float], tuple[float, float]], group: Parallel
    ) -> None:
        self._file, self._fingerprint, self._evaluate, self._group = file, fingerprint, evaluate, group
        saved = files.read_object(file) if group.is_rank_zero else {}  # absent or damaged: all are evaluated
        kept = saved if saved.get("fingerprint") == fingerprint else {}
        kept = group.gather_all_ranks(kept)[0]
        self.points = {point[0]: Point(*point) for point in kept.get("points", [])}
        # Of each choice: one may come after another.
        self._num_evaluated: dict[str, int] = kept.get("evaluations", {})
        self._choice = ""

    def begin(self, choice: Choice) -> None:
        self._choice = repr(choice)

    def at(self, alpha: float) -> Point:
        """A collective."""
        if alpha not in self.points:
            self._num_evaluated[self._choice] = self._num_evaluated.get(self._choice, 0) + 1
            self.points[alpha] = point = Point(alpha, *self._evaluate(alpha))
            logger.info(f"alpha {alpha:g}: {point.learned:.4f} on the task, forgotten {point.forgotten:.4f}")
            if self._group.is_rank_zero:
                points = [list(vars(each).values()) for each in self]
                content = {"fingerprint": self._fingerprint, "points": points, "evaluations": self._num_evaluated}
                files.replace_text(self._file, json.dumps(content) + "\n")
        return self.points[alpha]

    def __iter__(self) -> Iterator[Point]:
        return iter(sorted(self.points.values(), key=lambda point: point.alpha))

    def learned_share(self, point: Point) -> float:
        """Of what alpha 1 has learned."""
        start, end = self.at(0), self.at(1)
        return (start.learned - point.learned) / (start.learned - end.learned)

    def forgotten_share(self, point: Point) -> float:
        """Of what alpha 1 has forgotten; 0 where that is nothing."""
        end = self.at(1).forgotten
        return point.forgotten / end if end > 0 else 0.0

    def knee(self) -> Point:
        """Where what is learned exceeds what is forgotten the most, by their shares."""
        return max(self, key=lambda point: self.learned_share(point) - self.forgotten_share(point))

    @property
    def is_open(self) -> bool:
        """Whether the choice has one more evaluation."""
        return self._num_evaluated.get(self._choice, 0) < MAX_EVALUATIONS


def choose(front: Front, choice: Choice) -> Point:
    """The point that ``choice`` asks for, after at most MAX_EVALUATIONS evaluations, 0 and 1 among them, besides those of other choices; a collective."""
    front.begin(choice)
    front.at(0), front.at(1)
    if choice.alpha is not None:
        return front.at(choice.alpha)
    front.at(0.5)
    if choice.keep is not None:
        keep = choice.keep
        return _boundary(front, lambda point: front.learned_share(point) - keep, front.at(0), front.at(1))
    if choice.budget is not None:
        budget = choice.budget
        return _boundary(front, lambda point: budget - point.forgotten, front.at(1), front.at(0))
    while front.is_open:
        best, points = front.knee(), list(front)
        place = points.index(best)
        neighbours = [*points[max(0, place - 1) : place], *points[place + 1 : place + 2]]
        other = max(neighbours, key=lambda each: abs(each.alpha - best.alpha))
        if abs(other.alpha - best.alpha) < 0.1:
            break
        front.at(round((best.alpha + other.alpha) / 2, 3))
    return front.knee()


def _boundary(front: Front, margin: Callable[[Point], float], bad: Point, good: Point) -> Point:
    """The point nearest to ``bad`` whose margin is not below 0: secant steps inside the interval where its sign changes."""
    if margin(bad) >= 0:
        return bad
    if margin(good) < 0:
        return good
    for point in list(front):
        if min(bad.alpha, good.alpha) < point.alpha < max(bad.alpha, good.alpha):
            bad, good = (bad, point) if margin(point) >= 0 else (point, good)
    while front.is_open and abs(bad.alpha - good.alpha) > 0.02:
        share = margin(good) / (margin(good) - margin(bad))
        point = front.at(round(good.alpha + min(max(share, 0.1), 0.9) * (bad.alpha - good.alpha), 3))
        if point in (bad, good):
            break
        bad, good = (bad, point) if margin(point) >= 0 else (point, good)
    return good


def exponent(front: Front) -> float | None:
    """p of forgetting ~ alpha^p by the ends and the middle; None where nothing was forgotten."""
    half, end = front.at(0.5).forgotten, front.at(1).forgotten
    return math.log2(end / half) if half > 0 and end > 0 else None


def describe(front: Front, chosen: Point, choice: Choice) -> list[str]:
    """What was chosen and why, in sentences."""
    how = "the knee: the largest difference of the learned share and the forgotten share"
    if choice.alpha is not None:
        how = "as given"
    elif choice.keep is not None:
        how = f"the smallest evaluated one that keeps {choice.keep:.0%} of what was learned"
    elif choice.budget is not None:
        how = f"the largest evaluated one that forgets at most {choice.budget:g} nats per token"
    sentence = f"alpha {chosen.alpha:g}, {how}: {front.learned_share(chosen):.0%} of what was learned, {front.forgotten_share(chosen):.0%} of what was forgotten ({chosen.forgotten:.4f} of {front.at(1).forgotten:.4f} nats per token)"
    power = exponent(front) if 0.5 in front.points else None
    if chosen.alpha == 1:
        return [sentence, "alpha 1 is the tuned model itself: no average is better by this choice"]
    if power is None or power >= _FAIR_EXPONENT:
        return [sentence]
    half = f"half of the way forgets {front.forgotten_share(front.at(0.5)):.0%} of the whole: the rate was too high, and a lower one forgets less than any average of this run; try half of it"
    return [sentence, half]


class Averages:
    """A run's model at any alpha, and what it has learned and forgotten there.

    Raises UserError for a folder that is no finished run, a config with components from outside finch and torchtune, or rows that cannot be read.
    """

    def __init__(self, run: Path, cfg: DictConfig, parallel: Parallel) -> None:
        self.run, self._cfg, self._parallel = run, cfg, parallel
        self.out = run_files.inside(run, run_files.AVERAGE)
        cfg = DictConfig(OmegaConf.merge(without_lora(cfg), {"check_dataset": False}))
        precision = precision_of(cfg.dtype)
        model = LoadedModel(cfg, precision)
        if not isinstance(model.base, HuggingFaceFolder):
            raise UserError(
                f"checkpointer.checkpoint_dir={model.base.folder} has no config.json; averages need a Hugging Face folder"
            )
        self.base = model.base
        self.tuned = HuggingFaceFolder(str(self._tuned_folder()))
        tokenizer = build(cfg.tokenizer, "tokenizer")
        self._data = TrainingData(cfg, tokenizer, parallel, seed=0, needs_stats=False)
        limit = getattr(model.decoder, "max_seq_len", None)
        settings = read_probes(cfg)
        self.old = next((name for name, each in settings.items() if not each.task), _EVERYDAY)
        if self.old == _EVERYDAY:
            settings[_EVERYDAY] = schema.Probe(kind="self", rows=64, max_new_tokens=48)
        self._probes = {name: read_rows(name, each, tokenizer, limit) for name, each in settings.items()}
        self._answers = {
            name: own_answers(name, rows, settings[name], self.out if name == _EVERYDAY else run, tokenizer)
            for name, rows in self._probes.items()
            if rows.kind == "self"
        }
        kinds = {name: rows.kind for name, rows in self._probes.items()}
        self.key = selection_key(cfg, kinds)
        self._model = model.in_memory(parallel)
        self._data.samples.rows = list(self._data.samples.rows)[:_MAX_TRAINING_ROWS]
        self._alpha = math.nan
        self._load(0)
        self._load_answers(precision.compute)
        self._start = self._probe_value(self.old)
        self._task: dict[float, float] = {}
        self._choose_metric()

    def evaluate(self, alpha: float) -> tuple[float, float]:
        """What the task's metric is, lower is better, and what was forgotten; a collective."""
        if alpha == 0:
            return self._task[0.0], 0.0
        self._load(alpha)
        task = self._task[alpha] if alpha in self._task else self._task_value()
        return task, self._probe_value(self.old) - self._start

    def measure(self, alpha: float) -> dict[str, float]:
        """The validation losses and probes of the run's metrics.jsonl, of this average; a collective."""
        self._load(alpha)
        sets = self._data.validations.items()
        found = {key: dataset_loss(self._model, self._data.eval_loader(samples, "")) for key, samples in sets}
        for name in self._probes:
            if name != _EVERYDAY:
                found |= {f"probe/{name}/{key}": value for key, value in self._measure(name).items()}
        return found

    @property
    def fingerprint(self) -> str:
        """Of both models and what is measured, on which rows."""
        data = self._data.validations.get(self.key or "", self._data.samples)
        is_read = not (self.key or "").startswith("probe/")
        rows = {name: probe.digest for name, probe in self._probes.items()}
        rows["data"] = str(collect_stats(data, 0, 1).digest) if is_read else ""
        measured = {"new": self.key, "old": self.old, "rows": rows}
        return fingerprint_of([*self.base.files, *self.tuned.files], 0, measured)

    def _tuned_folder(self) -> Path:
        """That of the run's model, its adapter merged into the pretrained one where there is no other; a collective."""
        folder, message = tuned_folder(self.run), None
        if (folder / "config.json").is_file():
            return folder
        if self._parallel.is_rank_zero:
            try:
                files.make_folder(self.out)
                merge_folder(self.base.folder, folder, self.out / _MERGED)
            except UserError as error:
                message = str(error)
        message = self._parallel.gather_all_ranks(message)[0]
        if message is not None:
            raise UserError(message)
        return self.out / _MERGED

    def write(self, alpha: float) -> None:
        """RUN/average/model, on one rank; replaces one that is there."""
        if not self._parallel.is_rank_zero:
            return
        partial = self.out / "partial"
        files.remove(partial)
        for name in (MEASURED, TUNED):
            files.remove(self.out / name)
        [folder] = wise_ft(self.base.folder, self.tuned.folder, [alpha], partial)
        files.replace_folder(folder, self.out / "model")
        partial.rmdir()
        files.remove(self.out / _MERGED)

    def _choose_metric(self) -> None:
        """The loss on training rows, where the metric of RUN/best is missing or has not improved. Raises UserError if that has not either."""
        for key in dict.fromkeys((self.key, None)):
            self.key = key
            for alpha in (0.0, 1.0):
                self._load(alpha)
                self._task[alpha] = self._task_value()
            if self._task[1.0] < self._task[0.0]:
                return
            what = key or f"loss on {len(self._data.samples.rows)} training rows"
            logger.warning(
                f"the {what} is no better than before training, {self._task[1.0]:.4f} after {self._task[0.0]:.4f}"
            )
        raise UserError(f"{self.run} has learned nothing that is measured: there is nothing to average")

    def _task_value(self) -> float:
        if self.key is None:
            return dataset_loss(self._model, self._data.eval_loader(self._data.samples, ""))
        if not self.key.startswith("probe/"):
            return dataset_loss(self._model, self._data.eval_loader(self._data.validations[self.key], ""))
        _, name, metric = self.key.split("/", 2)  # perhaps of a group
        value = self._measure(name)[metric]
        return -value if metric.partition("/")[0] == "accuracy" else value

    def _probe_value(self, name: str) -> float:
        values = self._measure(name)
        return values.get("kl", values["loss"])

    def _measure(self, name: str) -> Mapping[str, float]:
        return evaluate(self._model, name, self._probes[name], self._data.eval_settings)

    def _load_answers(self, dtype: torch.dtype) -> None:
        """Those of the run, or generated now, while the weights are the pretrained ones; a collective."""
        for name, answers in self._answers.items():
            if not answers.load(self.base.files, model_settings(self._cfg), self._parallel):
                answers.generate(self._model, self._parallel, dtype, self._data.eval_settings)
            self._probes[name].samples = answers.samples

    @torch.no_grad()
    def _load(self, alpha: float) -> None:
        """Each rank blends its shards; nothing to do where the model is at ``alpha`` already."""
        if alpha == self._alpha:
            return
        self._alpha = alpha
        weights = self._model.decoder.state_dict(keep_vars=True)
        (self.tuned if alpha == 1 else self.base).load_into([weights])
        for name, tensor in self.tuned.weights() if 0 < alpha < 1 else ():
            if name in weights:
                own = to_local(weights[name])
                own.copy_(blend(own, tensor[local_block(weights[name])].to(own.device, own.dtype), alpha))


def without_lora(cfg: DictConfig) -> DictConfig:
    """A copy of a config, whose model is the builder's without LoRA layers."""
    cfg = copy.deepcopy(cfg)
    module, _, builder = str(cfg.model["_component_"]).rpartition(".")
    if builder.startswith("lora_"):
        # LoRA builders take quantize_base as well, which finch refuses and so has not among its keys.
        arguments = {*schema.LoraBuilder.model_fields, "quantize_base"}
        model = {key: value for key, value in cfg.model.items() if key not in arguments}
        cfg.model = {**model, "_component_": f"{module}.{builder.removeprefix('lora_')}"}
    return cfg


def tuned_folder(run: Path) -> Path:
    """The folder of a run's model or adapter: ``best``, else the last epoch. Raises UserError if there is none."""
    folder = run_files.chosen_model(run)
    if folder is None:
        raise UserError(f"{run} has no model: give the folder of a run that has ended an epoch")
    return folder.resolve()


def read_config(run: Path, base: Path | None, unused: Collection[str] = UNUSED, *, trust: bool = False) -> DictConfig:
    """RUN/config.yaml for one process; ``base``: where the pretrained folder is now; ``unused``: keys that are left out.

    Raises UserError as :func:`finch.evaluation.foreign.read_config_of`, which has ``trust``.
    """
    blocks = read_config_of(run, unused, trust=trust)
    if base is not None:
        checkpointer = blocks.get("checkpointer")
        old = checkpointer.get("checkpoint_dir") if isinstance(checkpointer, dict) else None
        if not isinstance(old, str) or not old.strip("/"):
            raise UserError(
                f"{run}/{run_files.CONFIG} names no checkpointer.checkpoint_dir, which --base={base} would replace; restore it"
            )

        def moved(value: Any, _: str) -> Any:
            is_inside = isinstance(value, str) and f"{value}/".startswith(f"{old.rstrip('/')}/")
            return str(base) + value[len(old.rstrip("/")) :] if is_inside else value

        blocks = map_values(blocks, moved)
    required = {"dataset": {"_component_": ROWS}} if "dataset" in unused else {}
    return check(OmegaConf.create({**required, **blocks, **_ONE_PROCESS}), schema.LoraFinetuneKeys)


def average(
    run: Path, choice: Choice, *, base: Path | None = None, trust: bool = False, verify: bool = False
) -> list[str]:
    """Chooses alpha, writes RUN/average and returns what is to be said.

    Args:
        base: the pretrained folder, where it has moved.
        trust: the run is the user's own: all that its config.yaml names is imported, from the current folder too.
        verify: compare the models' files with their digests.

    Raises UserError, see :class:`Averages`.
    """
    choice.check()
    cfg = read_config(run, base, trust=trust)
    for _, error in file_errors(cfg):
        raise UserError(f"{run}/{run_files.CONFIG}: {error}{relative_to(error)}") from error
    tuned = tuned_folder(run)
    for folder in (tuned, Path(cfg.checkpointer.checkpoint_dir)):
        check_export(folder, by_digest=verify)
    is_inside = tuned.is_relative_to(run.resolve()) and all(map(is_own, filter(Path.is_file, tuned.iterdir())))
    if not trust and not is_inside:
        raise UserError(
            f"{run} links files outside of it, which would go into the average; --trust takes those of a run of your own"
        )
    if not trust:
        pretrained = open_checkpoint(cfg.checkpointer)
        check_pretrained(run, pretrained.folder, pretrained.files)
    device, lock = distributed.local_device(cfg.device), RunLock(run)
    with _writing(run):
        lock.acquire()
    group = distributed.start_from(cfg, device, shard=precision_of(cfg.dtype).is_mixed)
    try:
        with offline(not trust):
            return average_in(run, choice, cfg, group)
    finally:
        distributed.stop()
        lock.release()


def average_in(run: Path, choice: Choice, cfg: DictConfig, group: Parallel) -> list[str]:
    """As :func:`average`, on the ranks of ``group``; a collective."""
    tuned_folder(run)
    averages = Averages(run, cfg, group)
    with _writing(run):
        if group.is_rank_zero:
            files.make_folder(averages.out)
        front = Front(averages.out / "front.json", averages.fingerprint, averages.evaluate, group)
        chosen = choose(front, choice)
        lines, measured = describe(front, chosen, choice), averages.measure(chosen.alpha)
        averages.write(chosen.alpha)
        if group.is_rank_zero:
            _write_front(averages, front, chosen, lines)
            files.replace_text(averages.out / MEASURED, json.dumps(measured) + "\n")
            tuned = {"manifest": manifest_digest(tuned_folder(run))}
            files.replace_text(averages.out / TUNED, json.dumps(tuned) + "\n")
    return [*lines, f"its model: {averages.out / 'model'}"]


@contextlib.contextmanager
def _writing(run: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = error.filename or run / run_files.AVERAGE
        raise UserError(
            f"{place} cannot be written ({error.strerror or error}); make room, or remove what is in the way"
        ) from error


def _write_front(averages: Averages, front: Front, chosen: Point, lines: list[str]) -> None:
    learned = averages.key or "loss on training rows"
    header = ["alpha", learned, f"forgotten by {averages.old}", "learned share", "forgotten share"]
    rows = [
        [point.alpha, point.learned, point.forgotten, front.learned_share(point), front.forgotten_share(point)]
        for point in front
    ]
    with files.atomic_file(averages.out / "front.csv") as partial, partial.open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    table = [header, ["---"] * len(header), *([f"{value:.4g}" for value in row] for row in rows)]
    text = "\n".join("| " + " | ".join(row) + " |" for row in table)
    card = f"# {averages.run.name}, averaged with its pretrained model\n\n" + "\n\n".join(lines)
    card += f"\n\ntheta = (1 - {chosen.alpha:g}) x {averages.base.folder} + {chosen.alpha:g} x {tuned_folder(averages.run)}\n\n{text}\n"
    files.replace_text(averages.out / "README.md", card)
    if find_spec("matplotlib") is not None:
        with files.atomic_file(averages.out / "front.png") as partial:
            _draw(front, chosen, partial)


def _draw(front: Front, chosen: Point, file: Path) -> None:
    figure, (axes,) = new_panels((5, 4), 1, 1)
    points = list(front)
    x, y = [[100 * share(point) for point in points] for share in (front.learned_share, front.forgotten_share)]
    axes.plot(x, y, marker="v", color=COLOURS["violet"])  # as WiSE-FT in a report
    for point, left, top in zip(points, x, y, strict=True):
        weight = "bold" if point == chosen else "normal"
        axes.annotate(f"{point.alpha:g}", (left, top), (6, 4), textcoords="offset points", fontweight=weight)
        if point == chosen:
            axes.plot(left, top, "o", markersize=14, markerfacecolor="none", color=COLOURS["ink"])
    axes.yaxis.set_inverted(True)
    axes.set(
        xlabel=f"learned, % of the tuned model's\n{MORE_LEARNED}",
        ylabel=f"forgotten, % of the tuned model's\n{LESS_FORGOTTEN}",
        title="Averages by alpha",
    )
    figure.savefig(file, format="png")


class Average(Hook):
    """``average: auto``: averages the run's model once it has ended, on the run's own mesh."""

    def start(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def after_training(self, state: TrainState) -> None:
        trainer = self._trainer
        for line in average_in(trainer.run.path, Choice(), trainer.cfg, trainer.parallel):
            logger.info(f"average: {line}")

    def after_end(self, trainer: Trainer) -> None:
        """The run may have been killed while it averaged."""
        is_there = (trainer.run.path / run_files.AVERAGE / "model" / run_files.HF_CONFIG).is_file()
        if not trainer.parallel.gather_all_ranks(is_there)[0]:
            self.start(trainer)
            self.after_training(trainer.state)
