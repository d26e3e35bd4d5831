"""What a run shows at the ends of its epochs and of itself: RUN/loss.png, and which epoch to use, how to load it, what was forgotten."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from finch.base import extras, files, run_files
from finch.base.log import logger
from finch.base.progress import duration
from finch.objectives.divergence import describe, moved_groups
from finch.training.checkpointer import TrainState
from finch.training.hooks import Hook, Trainer
from finch.training.run import describe_best
from finch.training.style import COLOURS, name_ends, new_panels, no_math

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PROBE_COLOURS = [COLOURS[name] for name in ("green", "pink", "amber", "sky", "violet", "brown", "ink")]
_MAX_STEPS_WITH_MARKERS = 60
_HARDLY_FELL = 0.95


class Summary(Hook):
    """Draws the losses after each epoch, and logs the summary at the end; on one rank."""

    def __init__(self) -> None:
        if missing := extras.missing_after_training():
            logger.info(missing)

    def start(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def after_epoch(self, state: TrainState) -> None:
        if self._trainer.parallel.is_rank_zero:
            update_loss_figure(self._trainer.run.path)

    def after_training(self, state: TrainState) -> None:
        trainer = self._trainer
        if not trainer.parallel.is_rank_zero:
            return
        run, last = trainer.run.path, trainer.exported(f"epoch_{state.epoch - 1}")
        lines = run_files.read_metrics(run / run_files.METRICS)
        steps = [line for line in lines if "num_target_tokens" in line]
        tokens = sum(line["num_target_tokens"] for line in steps)
        seconds = time.perf_counter() - trainer.run.start_time  # earlier attempts of a resumed run are not counted
        model = epoch_to_use(run, state.best, last=last, select_by=state.select_by)
        own, base = shlex.quote(str(run)), shlex.quote(str(trainer.base.folder))
        evaluate = f"finch evaluate --base {base} --tuned {own}{'/average' * ('final_average' in trainer.hooks)}"
        stopped = [f"stopped by {state.stop.reason}"] if state.stop is not None else []
        for line in (
            *stopped,
            *model,
            *learning(steps, None if trainer.loss.reference is None else trainer.loss.reference.mean),
            *forgetting(lines, None if state.best is None else _epoch(state.best["epoch"])),
            *(line for hook in trainer.hooks.values() for line in hook.summary(state)),
            *trainer.loss.replay.summary(steps),
            f"{len(steps):,} step{'s' * (len(steps) != 1)}, {tokens:,} target tokens; {duration(seconds)} since this start",
            *([f"next: finch chat {own}; finch average {own}; {evaluate}"] if model else []),
        ):
            logger.info(line)


def epoch_to_use(run: Path, best: Mapping[str, Any] | None, *, last: str, select_by: str | None) -> list[str]:
    """The epoch to use, and how to load it; nothing if its folder is elsewhere, as after a resume from another run's checkpoint."""
    epochs = int(last.split("_")[1]) + 1
    if run_files.chosen_model(run) == run / run_files.WITHIN_BUDGET:
        chosen = f"the last model inside {run_files.BUDGET}, which has ended the run"
        folder, name = run / run_files.WITHIN_BUDGET, (run / run_files.WITHIN_BUDGET).readlink().name
    elif best is not None and (run / run_files.BEST).is_symlink():
        number = _epoch(best["epoch"])
        place = best["epoch"].removeprefix("best_").replace("_", " ") if number is None else f"{number + 1} of {epochs}"
        chosen = f"best {'model' if number is None else 'epoch'}: {place}, {describe_best(best)}"
        folder, name = run / run_files.BEST, (run / run_files.BEST).readlink().name
    else:
        reason = f"no {select_by.replace('_', ' ')} was finite" if select_by else "there are no validation rows"
        chosen = f"last epoch: {epochs} of {epochs}; {reason}"
        folder, name = run / last, last
    if not folder.exists():
        return []
    if name.endswith("_adapter"):
        return [chosen, f'its adapter: peft.AutoPeftModelForCausalLM.from_pretrained("{folder}"){_conflict()}']
    adapter = run / f"{name}_adapter"
    adapter_text = f"; its adapter: {adapter}{_conflict()}" if adapter.exists() else ""
    return [chosen, f'its model: transformers.AutoModelForCausalLM.from_pretrained("{folder}"){adapter_text}']


def _conflict() -> str:
    conflict = extras.peft_conflict(extras.version("peft"), extras.version("torchao"))
    return f"; {conflict}" if conflict else ""


def learning(steps: Sequence[Mapping[str, Any]], pretrained: float | None) -> list[str]:
    """How far the loss of the training rows fell, and what to try if it did not: of the last epoch, next to the ``pretrained`` model's mean in nats, or
    where that is not known the first epoch's. Two batches have other rows: what they differ by says little."""
    # JSON has no NaN: a loss that was not finite, or of no token, is null.
    steps = [line for line in steps if line["loss"] is not None]
    if len(steps) < 2:
        return []
    losses = [line["loss"] for line in steps]
    lines = [f"loss {losses[0]:.4f} nats at step {steps[0]['step']}, {losses[-1]:.4f} at step {steps[-1]['step']}"]
    if share := run_files.capped_share(steps):  # there its rate does not follow the loss
        lines.append(f"FINCH was at its cap, lr_scheduler.eta_max, in {share:.0%} of the steps")
    last, first = (_mean_loss(steps, epoch) for epoch in (steps[-1]["epoch"], steps[0]["epoch"]))
    before = pretrained if pretrained is not None else first if steps[0]["epoch"] < steps[-1]["epoch"] else None
    ratio = 0.0 if before is None else last / max(before, 1e-12)
    if ratio > 1 / _HARDLY_FELL:
        lines.append("the loss rose: halve optimizer.lr (docs/choose.md)")
    elif ratio > _HARDLY_FELL:
        lines.append("the loss hardly fell: double optimizer.lr, or train for more epochs (docs/choose.md)")
    return lines


def _mean_loss(steps: Sequence[Mapping[str, Any]], epoch: int) -> float:
    """Per target token."""
    own = [line for line in steps if line["epoch"] == epoch]
    return fmean([line["loss"] for line in own], [line["num_target_tokens"] for line in own])


def forgetting(lines: Sequence[Mapping[str, Any]], best_epoch: int | None) -> list[str]:
    """A line for each metric of a probe: its value at step 0, and its change since then at the best epoch (from 0) and at the last evaluation."""
    evaluations = [line for line in lines if any(key.startswith("probe/") for key in line)]
    keys = dict.fromkeys(key for line in evaluations for key in line if re.match("probe/.+/(loss|accuracy|kl)$", key))
    found = []
    for key in keys:
        measured = [line for line in evaluations if line.get(key) is not None]
        # The values at step 0 are of epoch 0 too, and not a result of it.
        at_best = [line for line in measured if line["epoch"] == best_epoch and line["step"] > 0]
        if not measured or measured[-1]["step"] == 0:
            continue
        is_kl = key.endswith("/kl")
        start = "" if is_kl or measured[0]["step"] > 0 else f" {measured[0][key]:.4f} at step 0,"
        change = key if is_kl else f"{key}_change"
        ends = [("at the best epoch", at_best[-1])] if at_best else []
        values = [
            f"{line[change]:+.4f} {place}"
            for place, line in [*ends, (f"at step {measured[-1]['step']}", measured[-1])]
            if line.get(change) is not None
        ]
        found.append(f"{key}:{start} {', '.join(values)}")
        if is_kl and (groups := describe(_of_probe(measured[-1], key))):
            found.append(f"{key}: {groups}")
    return found


def _of_probe(line: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A line's metrics of one probe by their short names; ``key``: of one of them."""
    prefix = key.removesuffix("kl")
    return {name.removeprefix(prefix): value for name, value in line.items() if name.startswith(prefix)}


def _epoch(name: str) -> int | None:
    """The epoch's number, from 0, by ``epoch_0``; None for ``best_step_9``, a model within an epoch."""
    return int(name.split("_")[1]) if run_files.is_epoch(name) else None


def update_loss_figure(run: Path) -> None:
    """Draws a run's metrics.jsonl; called on one rank. Without matplotlib nothing happens, and a failure is only a warning."""
    if find_spec("matplotlib") is None:
        logger.debug(f"{run / run_files.LOSS_FIGURE} is not drawn: matplotlib is not installed")
        return
    try:
        draw(run_files.read_metrics(run / run_files.METRICS), run / run_files.LOSS_FIGURE)
    except Exception as error:  # the run matters more than its figure
        logger.warning(f"{run / run_files.LOSS_FIGURE} could not be drawn ({type(error).__name__}: {error})")


def draw(lines: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Draws lines of a metrics.jsonl into a PNG file."""
    from matplotlib.ticker import MaxNLocator

    steps = [line for line in lines if "loss" in line]
    lost = _lost(lines)
    heights = (3, 2.4, 2) if lost else (3, 2)
    figure, panels = new_panels((8, 8.0 if lost else 5.6), len(heights), 1, sharex=True, height_ratios=heights)
    losses, rates = panels[0], panels[-1]

    x = [line["step"] for line in steps]
    few: dict[str, Any] = {"marker": "."} if len(steps) <= _MAX_STEPS_WITH_MARKERS else {}
    ema = _column(steps, "ema_loss")
    has_ema = not all(math.isnan(value) for value in ema)
    colour, width = ("grey", 0.8) if has_ema else ("blue", 1.4)
    losses.plot(x, _column(steps, "loss"), color=COLOURS[colour], linewidth=width, label="loss of the step", **few)
    if has_ema:
        losses.plot(x, ema, color=COLOURS["blue"], linewidth=1.8, label="EMA")
    known = dict.fromkeys(key for line in lines for key, value in line.items() if value is not None)
    validated = [key for key in known if key == "validation_loss" or key.startswith("validation/")]
    for key, style in zip(validated, itertools.cycle(("-", "--", ":", "-."))):
        validations = [line for line in lines if line.get(key) is not None]
        at = [line["step"] for line in validations]
        label = "validation" if key == "validation_loss" else key.removesuffix("/loss")
        values, colour = _column(validations, key), COLOURS["vermilion"]
        losses.plot(at, values, color=colour, linewidth=1.4, linestyle=style, marker="o", markersize=5, label=label)
    losses.set_ylabel("loss, nats per token")
    losses.set_title(
        no_math(f"{file.parent.name}: what was learned{', what was forgotten' if lost else ''}, and the rate"),
        loc="left",
        fontsize=11,
    )

    if lost:
        _draw_lost(panels[1], lost)
    rates.plot(x, _column(steps, "lr"), color=COLOURS["blue"], linewidth=1.4, **few)
    caps = [line["lr"] for line in steps if line.get("lr_is_capped")]
    if caps:
        cap, label = [max(caps)] * 2, f"eta_max = {max(caps):.3g}"
        rates.plot([x[0], x[-1]], cap, color=COLOURS["ink"], linestyle="--", linewidth=1.0, label=label)
    rates.set(xlabel="step", ylabel="learning rate")
    # A rate that is 0 throughout would leave the axis no height.
    rates.set_ylim(0, 1.08 * max([line["lr"] for line in steps], default=1.0) or 1.0)
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rates.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    name_ends(*panels)
    with files.atomic_file(file) as partial:
        figure.savefig(partial, format="png", dpi=130)


def _draw_lost(axes: Axes, lost: Mapping[str, tuple[list[int], list[float]]]) -> None:
    """What the probes lost since step 0; accuracies with a dashed line, in the same numbers."""
    for (label, (at, values)), colour in zip(lost.items(), itertools.cycle(_PROBE_COLOURS)):
        style = "--" if label.endswith("accuracy") else "-"
        axes.plot(at, values, color=colour, linewidth=1.4, linestyle=style, marker="o", markersize=4, label=label)
    axes.axhline(0, color=COLOURS["ink"], linewidth=0.8)
    has_accuracy = any(label.endswith("accuracy") for label in lost)
    rise = "rise of losses, fall\nof accuracy since step 0" if has_accuracy else "rise since\nstep 0, nats per token"
    axes.set_ylabel(f"forgotten: {rise}")


def _lost(lines: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and, since step 0, the rises of each probe's losses and KL and the falls of its accuracy, by ``NAME loss`` and the like."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    ends = {key: line for line in lines for key in line if key.startswith("probe/") and key.endswith("/kl")}
    groups = {f"{key}/{group}" for key, line in ends.items() for group in moved_groups(_of_probe(line, key))}
    for line in lines:
        for key, value in line.items():
            is_rise = key.endswith(("_change", "/kl")) or key in groups
            is_drawn = key in groups or (key.count("/") == 2 and not key.endswith(("_low", "_high")))
            if is_drawn and key.startswith("probe/") and value is not None and (is_rise or line["step"] == 0):
                label = key.removeprefix("probe/").removesuffix("_change").replace("/", " ")
                at, values = found.setdefault(label, ([], []))
                at.append(line["step"])
                rise = value if is_rise else 0.0
                values.append(-rise if label.endswith("accuracy") else rise)
    return found


def _column(lines: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    return [math.nan if line.get(key) is None else line[key] for line in lines]
