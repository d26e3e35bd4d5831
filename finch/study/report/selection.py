"""Which tasks and probes a report compares: the new task, the old tasks of its trade-off, the other old ones and the reliability tasks.

Tasks come from evaluations. Where no run has an evaluated task of a role, the probes in metrics.jsonl take its place; of the new task else the validation loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from finch.base.errors import UserError
from finch.evaluation.custom_tasks import CUSTOM
from finch.evaluation.results import NATS, NATS_PER_CHARACTER, NEW, OLD, POINTS, RELIABILITY
from finch.evaluation.tasks.registry import VALIDATION
from finch.study.report.runs import Run, check_equal

PROBE, VALIDATION_LOSS = "probe", "validation_loss"
_UNITS = (POINTS, NATS, NATS_PER_CHARACTER)
"""The first that old tasks have is the trade-off's."""
_PROBE_METRICS = {
    "accuracy": "accuracy on the rows of the probe {}",
    "loss": "mean loss on the rows of the probe {}, nats per token",
    "kl": "KL divergence from the pretrained model on the rows of the probe {}, nats per token",
}


@dataclass(frozen=True)
class Measure:
    """A task, or a probe or the validation rows that take a task's place.

    Attributes:
        name: the task's, or the probe's, with its metric where several metrics of the probe could be meant (``own_answers.kl``).
        source: the suite, ``probe`` or ``validation_loss``.
        unit: ``points`` (scores are fractions, shown in percent), ``nats`` (losses and divergences in nats per token), or ``nats per character``.
        is_higher_better: False for losses, divergences and Brier's error.
        key: of its values in metrics.jsonl; empty for a task.
        is_at_chance: the pretrained model is not above chance: the 95% interval of its score includes it, or lies below.
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
    is_at_chance: bool = False

    @property
    def title(self) -> str:
        """The name in a table's header."""
        return f"{self.name} (at chance)" if self.is_at_chance else self.name

    @property
    def label(self) -> str:
        """Of an axis with its scores."""
        return f"{self.name}: {self.metric}, {self.score_unit}"

    @property
    def scale(self) -> float:
        """From a value to what is shown."""
        return 100.0 if self.unit == POINTS else 1.0

    @property
    def sign(self) -> int:
        """From a value to one where more is better, and back."""
        return 1 if self.is_higher_better else -1

    @property
    def places(self) -> int:
        """Decimals that are shown."""
        return 1 if self.unit == POINTS else 3

    @property
    def score_unit(self) -> str:
        return "%" if self.unit == POINTS else self.change_unit

    @property
    def change_unit(self) -> str:
        return "nats per token" if self.unit == NATS else self.unit

    @property
    def is_probe(self) -> bool:
        return bool(self.key)


@dataclass(frozen=True)
class Selection:
    """What is compared.

    Attributes:
        new: what was learned; None where nothing measures it.
        old: the old tasks of the trade-off, all of one unit.
        other_old: old tasks that have their changes only in the tables: of another unit, at chance, or not named.
    """

    new: Measure | None
    old: Sequence[Measure]
    other_old: Sequence[Measure]
    reliability: Sequence[Measure]

    @property
    def measures(self) -> list[Measure]:
        return [*([self.new] if self.new else []), *self.old, *self.other_old, *self.reliability]


def select_measures(
    runs: Sequence[Run], *, new_task: str | None = None, old_tasks: Sequence[str] | None = None
) -> Selection:
    """
    Args:
        new_task: name of a task or probe; None: what the evaluations or probes mark as new.
        old_tasks: names of tasks and probes; None: all old ones, of which those in points, else in nats per token, where the evaluated ones have several units.

    Raises:
        UserError: a name is not known, the old tasks have different units, or it is not known which task is new.
    """
    probes, named_probes = _probes(runs)
    new_name = new_task if new_task in named_probes else _find_new_task(runs, new_task, named_probes)
    evaluated = _evaluated(runs, new_name)
    known = {**named_probes, **evaluated}
    marked = next((one for one in probes if one.role == NEW), None) or _validation(runs)
    new = replace(known[new_name], role=NEW) if new_name is not None and new_name in known else marked
    every_old = [one for one in evaluated.values() if one.role == OLD]
    every_old = every_old or [one for one in probes if one.role == OLD and (new is None or one.key != new.key)]
    reliability = [one for one in evaluated.values() if one.role == RELIABILITY]
    if old_tasks is None:
        unit = min((one.unit for one in every_old), key=_UNITS.index, default=POINTS)
        old = [one for one in every_old if one.unit == unit]
    else:
        old = _named_old(old_tasks, known, new)
    keys = {(one.name, one.key) for one in old}
    others = ([one for one in those if (one.name, one.key) not in keys] for those in (every_old, reliability))
    return Selection(new, old, *others)


def _named_old(names: Sequence[str], known: Mapping[str, Measure], new: Measure | None) -> list[Measure]:
    option = f"--old-tasks={','.join(names)}"
    if not names:
        raise UserError(f"{option} names no task; known are {_listed(known)}")
    for name in names:
        if name not in known:
            raise UserError(f"{option}: {name} is neither an evaluated task nor a probe; known are {_listed(known)}")
    # Two names of a probe's metric are one measure.
    chosen = list({(one.source, one.key or one.name): one for one in (known[name] for name in names)}.values())
    if new is not None and any((one.key or one.name) == (new.key or new.name) for one in chosen):
        raise UserError(f"{option}: {new.name} is the new task; leave it out, or choose another one by --new-task")
    of_unit = {unit: those for unit in _UNITS if (those := [one.name for one in chosen if one.unit == unit])}
    if len(of_unit) > 1:
        texts = " and ".join(f"{', '.join(those)} in {unit}" for unit, those in of_unit.items())
        raise UserError(f"{option}: {texts} have no common mean; name tasks of one unit")
    return [replace(one, role=OLD) for one in chosen]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _evaluated(runs: Sequence[Run], new_name: str | None) -> dict[str, Measure]:
    """The evaluated tasks of all runs, by name; a task of several suites is a named suite's first."""
    found: dict[str, Measure] = {}
    for run in runs:
        for suite, result in sorted(run.results.items(), key=lambda item: item[0] == CUSTOM):
            for name, task in result.tasks.items():
                if task.score is not None and name not in found:
                    what = NEW if name == new_name else task.role, suite, task.metric, task.definition
                    found[name] = Measure(name, *what, task.unit, task.is_higher_better, task.chance)
    return found


def _probes(runs: Sequence[Run]) -> tuple[list[Measure], dict[str, Measure]]:
    """The probes of all runs: one marked ``task: True`` by its accuracy where it has one, the others by their divergence, else their loss, which
    see a change long before accuracies do. And by the names that an option can give them: PROBE.METRIC, and PROBE for these, where no task has its name."""
    metrics = _probe_metrics(runs)
    marked = {name for run in runs for name in task_probes(run)}
    probes = []
    for name, those in metrics.items():
        wanted = "accuracy" if name in marked else "kl"
        metric = wanted if wanted in those else "loss"
        if "loss" in those:
            probes.append(_probe(name, name, metric, NEW if name in marked else OLD))
    tasks = {name for run in runs for result in run.results.values() for name in result.tasks}
    named = {one.name: one for one in probes if one.name not in tasks}
    keys = {one.key: one for one in named.values()}
    for probe, those in metrics.items():
        for metric in those:
            measure = _probe(f"{probe}.{metric}", probe, metric, OLD)
            named[measure.name] = keys.get(measure.key, measure)
    return probes, named


def _probe(name: str, probe: str, metric: str, role: str) -> Measure:
    unit = POINTS if metric == "accuracy" else NATS
    text = _PROBE_METRICS[metric].format(probe)
    return Measure(name, role, PROBE, metric, text, unit, metric == "accuracy", key=f"probe/{probe}/{metric}")


def _validation(runs: Sequence[Run]) -> Measure | None:
    """The loss on the validation rows, where all runs that have it share them."""
    found = [run for run in runs if any(line.get(VALIDATION_LOSS) is not None for line in run.metrics)]
    if len({str(run.config.get("dataset_validation")) for run in found}) != 1:
        return None
    text = "mean loss on the validation rows, nats per token"
    return Measure(
        "validation rows", NEW, VALIDATION_LOSS, "loss", text, NATS, is_higher_better=False, key=VALIDATION_LOSS
    )


def _probe_metrics(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Each probe's metrics in any run."""
    keys = {key for run in runs for line in run.metrics for key, value in line.items() if value is not None}
    names = sorted({key.split("/")[1] for key in keys if key.startswith("probe/")})
    return {name: [metric for metric in _PROBE_METRICS if f"probe/{name}/{metric}" in keys] for name in names}


def _find_new_task(runs: Sequence[Run], new_task: str | None, probes: Iterable[str]) -> str | None:
    """The name of the evaluated task that the runs learned; None: no run has one."""
    tasks = [
        (run, suite, name, task.role)
        for run in runs
        for suite, result in run.results.items()
        for name, task in result.tasks.items()
    ]
    if new_task is not None:
        evaluated = {name for _, _, name, _ in tasks}
        if new_task in evaluated:
            return new_task
        raise UserError(
            f"--new-task={new_task} was not evaluated; evaluated are {', '.join(sorted(evaluated)) or 'no tasks'}"
            + (f", probes are {', '.join(sorted(probes))}" if probes else "")
        )
    grids = {run.task: run for run in runs if run.task is not None}
    check_equal(
        grids,
        "{run} learned {one}, {other_run} learned {other}; report on runs of one task at a time, or name what they share by --new-task",
    )
    learned = {name for _, suite, name, role in tasks if role == NEW and not grids.keys().isdisjoint((suite, name))}
    if len(learned) == 1:
        return learned.pop()
    of_run: dict[str, set[str]] = {}
    for run, suite, name, role in tasks:
        if role == NEW and not suite.endswith(VALIDATION):
            of_run.setdefault(str(run.folder), set()).add(name)
    if not of_run:
        _check_training_data(runs)
        return None
    shared = set.intersection(*of_run.values())
    if len(shared) == 1:
        return shared.pop()
    if shared:
        raise UserError(
            f"the runs were evaluated on several new tasks: {', '.join(sorted(shared))}; choose one by --new-task"
        )
    (folder, names), *others = of_run.items()
    other_folder, other_names = next((one, those) for one, those in others if those != names)
    raise UserError(
        f"{folder} was evaluated on {', '.join(sorted(names))}, {other_folder} on {', '.join(sorted(other_names))}: "
        "different new tasks; report on runs of one task at a time"
    )


def _check_training_data(runs: Sequence[Run]) -> None:
    """Where nothing names the new task: probes marked ``task: True``, else the training data, have to be the same."""
    marks = {", ".join(task_probes(run)): run for run in runs if task_probes(run)}
    check_equal(
        marks, "probes: the new task of {run} is {one}, of {other_run} {other}; report on runs of one task at a time"
    )
    if marks:
        return
    files: dict[str, Run] = {}
    for run in runs:
        dataset = run.config.get("dataset")
        if isinstance(dataset, Mapping):
            source = dataset.get("data_files") or dataset.get("source") or dataset.get("_component_")
            files.setdefault(str(source), run)
    check_equal(
        files, "dataset: {run} learned {one}, {other_run} learned {other}; report on runs of one task at a time"
    )


def task_probes(run: Run) -> list[str]:
    """The run's probes that are marked ``task: True``."""
    return [name for name, block in (run.config.get("probes") or {}).items() if (block or {}).get("task")]
