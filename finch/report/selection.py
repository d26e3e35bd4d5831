"""Which tasks and probes a report compares: the new task, the old tasks of its trade-off, the other old ones and the reliability tasks.

Tasks come from evaluations. Where no run has an evaluated task of a role, the probes in metrics.jsonl take its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from finch.errors import UserError
from finch.evaluation.results import NATS, NEW, OLD, POINTS, RELIABILITY
from finch.report.comparability import find_new_task, task_probes
from finch.report.runs import Run

PROBE = "probe"
CUSTOM = "custom"
_PROBE_METRICS = {
    "accuracy": "accuracy on the rows of the probe {}",
    "loss": "mean loss on the rows of the probe {}, nats a token",
    "kl": "KL divergence from the pretrained model on the rows of the probe {}, nats a token",
}


@dataclass(frozen=True)
class Measure:
    """A task, or a probe that takes a task's place.

    Attributes:
        name: the task's, or the probe's, with its metric where several metrics of the probe could be meant (``own_answers.kl``).
        source: the suite, or ``probe``.
        unit: ``points`` (scores are fractions, shown in percent) or ``nats`` (losses and divergences in nats a token).
        is_higher_better: False for losses, divergences and Brier's error.
        key: of a probe's values in metrics.jsonl; empty for a task.
    """

    name: str
    role: str
    source: str
    metric: str
    definition: str
    unit: str = POINTS
    is_higher_better: bool = True
    chance: float | None = None
    key: str = ""

    @property
    def scale(self) -> float:
        """From a value to what is shown."""
        return 100.0 if self.unit == POINTS else 1.0

    @property
    def is_probe(self) -> bool:
        return self.source == PROBE


@dataclass(frozen=True)
class Selection:
    """What is compared.

    Attributes:
        new: what was learned; None where neither an evaluation nor a probe measures it.
        old: the old tasks of the trade-off, all of one unit.
        other_old: old tasks that have their changes in the tables alone.
    """

    new: Measure | None
    old: Sequence[Measure]
    other_old: Sequence[Measure]
    reliability: Sequence[Measure]


def select_measures(
    runs: Sequence[Run], *, new_task: str | None = None, old_tasks: Sequence[str] | None = None
) -> Selection:
    """
    Args:
        new_task: name of a task or probe; None: what the evaluations or probes mark as new.
        old_tasks: names of tasks and probes; None: all old ones, of which those in points where the evaluated ones have both units.

    Raises:
        UserError: a name is not known, the old tasks have different units, or it is not known which task is new.
    """
    named_probes = _named_probes(runs)
    if new_task in named_probes:
        new_name: str | None = new_task
    else:
        new_name = find_new_task(runs, new_task, list(named_probes))
    evaluated = {measure.name: measure for measure in _evaluated(runs, new_name)}
    probes = _probes(runs)
    new = evaluated.get(new_name) if new_name is not None else None
    if new is None and new_task is not None and new_task in named_probes:
        new = replace(named_probes[new_task], role=NEW)
    if new is None:
        new = next((one for one in probes if one.role == NEW), None)
    every_old = [one for one in evaluated.values() if one.role == OLD]
    every_old = every_old or [one for one in probes if one.role == OLD and (new is None or one.key != new.key)]
    reliability = [one for one in evaluated.values() if one.role == RELIABILITY]
    if old_tasks is None:
        units = {one.unit for one in every_old}
        old = [one for one in every_old if len(units) == 1 or one.unit == POINTS]
    else:
        old = _named_old(old_tasks, {**named_probes, **evaluated}, new)
    keys = {(one.name, one.key) for one in old}
    return Selection(
        new,
        old,
        [one for one in every_old if (one.name, one.key) not in keys],
        [one for one in reliability if (one.name, one.key) not in keys],
    )


def _named_old(names: Sequence[str], known: Mapping[str, Measure], new: Measure | None) -> list[Measure]:
    option = f"--old-tasks={','.join(names)}"
    if not names:
        raise UserError(f"{option} names no task; known are {_listed(known)}")
    for name in names:
        if name not in known:
            raise UserError(f"{option}: {name} is neither an evaluated task nor a probe; known are {_listed(known)}")
    # Two names of a probe's loss are one measure.
    chosen = list({(one.source, one.key or one.name): one for one in (known[name] for name in names)}.values())
    if new is not None and any((one.key or one.name) == (new.key or new.name) for one in chosen):
        raise UserError(f"{option}: {new.name} is the new task; leave it out, or choose another one by --new-task")
    of_unit = {unit: [one.name for one in chosen if one.unit == unit] for unit in (POINTS, NATS)}
    if all(of_unit.values()):
        texts = [f"{', '.join(those)} in {unit}" for unit, those in of_unit.items()]
        raise UserError(f"{option}: {texts[0]} and {texts[1]} have no common mean; name tasks of one unit")
    return [replace(one, role=OLD) for one in chosen]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _evaluated(runs: Sequence[Run], new_name: str | None) -> list[Measure]:
    """The evaluated tasks of all runs; a task of several suites is a named suite's first."""
    found: dict[str, Measure] = {}
    for run in runs:
        for suite, result in sorted(run.results.items(), key=lambda item: item[0] == CUSTOM):
            for name, task in result.tasks.items():
                if task.score is None:
                    continue
                role = NEW if name == new_name else task.role
                found.setdefault(
                    name,
                    Measure(
                        name, role, suite, task.metric, task.definition, task.unit, task.is_higher_better, task.chance
                    ),
                )
    return list(found.values())


def _probes(runs: Sequence[Run]) -> list[Measure]:
    """The probes of all runs: one marked ``task: True`` by its accuracy where it has one, the others by their losses, which see a change
    long before accuracies do."""
    metrics = _probe_metrics(runs)
    marked = {name for run in runs for name in task_probes(run)}
    found = []
    for name, those in metrics.items():
        role = NEW if name in marked else OLD
        if role == NEW and "accuracy" in those:
            found.append(_probe(name, name, "accuracy", role))
        elif "loss" in those:
            found.append(_probe(name, name, "loss", role))
    return found


def _named_probes(runs: Sequence[Run]) -> dict[str, Measure]:
    """By the names that an option can give them: PROBE.METRIC, and PROBE for what ``_probes`` takes of it, where no task has its name."""
    tasks = {name for run in runs for result in run.results.values() for name in result.tasks}
    found = {one.name: one for one in _probes(runs) if one.name not in tasks}
    for probe, metrics in _probe_metrics(runs).items():
        for metric in metrics:
            measure = _probe(f"{probe}.{metric}", probe, metric, OLD)
            same = found.get(probe)
            found[measure.name] = same if same is not None and same.key == measure.key else measure
    return found


def _probe(name: str, probe: str, metric: str, role: str) -> Measure:
    unit = POINTS if metric == "accuracy" else NATS
    text = _PROBE_METRICS[metric].format(probe)
    return Measure(name, role, PROBE, metric, text, unit, metric == "accuracy", key=f"probe/{probe}/{metric}")


def _probe_metrics(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Each probe's metrics in any run."""
    keys = {key for run in runs for line in run.metrics for key, value in line.items() if value is not None}
    names = sorted({key.split("/")[1] for key in keys if key.startswith("probe/")})
    return {name: [metric for metric in _PROBE_METRICS if f"probe/{name}/{metric}" in keys] for name in names}
