"""What a report compares: the new task, the old tasks and the reliability tasks of its runs, each with its score, its base and its change.

Runs can be compared that have one model and one pretrained model, evaluated alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from finch.base.errors import UserError
from finch.evaluation.judge import answers_definition
from finch.evaluation.results import POINTS, Sample, SuiteResult, TaskResult, base_path, read_result, read_samples
from finch.evaluation.statistics import Mean, holm, mean_interval, paired_delta
from finch.study.report.runs import Run, base_builder, check_equal
from finch.study.report.selection import Measure, Selection, select_measures

_KEPT = ("doc_id", "doc_hash", "score", "cluster", "confidence", "is_parsed", "letter", "answer")


@dataclass(frozen=True)
class _Bases:
    """The pretrained model's results by suite; ``read``: what was read of its samples so far, by folder and task: all runs share it.

    Attributes:
        folder: where its results are, or the folder that it is in, if they have been moved.
    """

    folder: Path | None
    results: dict[str, SuiteResult] = field(default_factory=dict)
    read: dict[tuple[Path, str], tuple[list[Sample], Mean]] = field(default_factory=dict)

    def file(self, run: Run, suite: str) -> Path:
        """The JSON that a run's was compared with."""
        path = base_path(run.result_path(suite), run.results[suite])
        assert path is not None
        if self.folder is not None:
            candidates = [self.folder / path.name, self.folder / path.parent.name / path.name]
            path = next((one for one in candidates if one.exists()), path)
        if not path.exists():
            raise UserError(
                f"{path} does not exist: the pretrained model's results that {run.folder} was compared with; give their folder by --base"
            )
        return path


@dataclass(frozen=True)
class Estimate:
    """A number and, where it has one, its standard error and 95% interval."""

    value: float
    standard_error: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float] | None:
        """Of the interval."""
        return None if self.low is None or self.high is None else (self.low, self.high)

    def times(self, factor: float) -> Estimate:
        """In another unit, or with the other sign."""
        ends = (self.low, self.high) if factor > 0 else (self.high, self.low)
        low, high = (None if end is None else factor * end for end in ends)
        error = None if self.standard_error is None else abs(factor) * self.standard_error
        return Estimate(factor * self.value, error, low, high)


@dataclass(frozen=True)
class Outcome:
    """A run's result on a measure.

    Attributes:
        base: the pretrained model's score; None where it was not measured.
        delta: score minus base.
        p_value, test: of the delta; None for a probe and for a divergence from the base.
        p_holm: the p value adjusted over the run's tasks.
        n: documents of the score; None for a probe.
        n_clusters: independent units of the score.
        step: where a probe was evaluated.
        others: further metrics by name.
    """

    measure: Measure
    score: Estimate
    base: Estimate | None = None
    delta: Estimate | None = None
    p_value: float | None = None
    test: str | None = None
    p_holm: float | None = None
    n: int | None = None
    n_clusters: int | None = None
    step: int | None = None
    samples: Sequence[Sample] = ()
    base_samples: Sequence[Sample] = ()
    others: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison(Selection):
    """What is compared, the runs, and their outcomes.

    Attributes:
        outcomes: for each run, its outcomes by measure's name.
        bases: the pretrained model's result of each suite.
    """

    runs: Sequence[Run]
    outcomes: Sequence[Mapping[str, Outcome]]
    bases: Mapping[str, SuiteResult]

    @property
    def by_run(self) -> list[tuple[Run, Mapping[str, Outcome]]]:
        return list(zip(self.runs, self.outcomes, strict=True))

    def is_complete(self, run: int) -> bool:
        """Whether a run has the new task and every old one: a place in the trade-off."""
        return self.new is not None and bool(self.old) and not self.missing_measures(run)

    def has_change(self, run: int, measure: Measure) -> bool:
        outcome = self.outcomes[run].get(measure.name)
        return outcome is not None and outcome.delta is not None

    def missing_measures(self, run: int) -> list[Measure]:
        """What keeps a run out of the trade-off: the new task without a score, and old tasks without a change."""
        outcomes = self.outcomes[run]
        old = [one for one in self.old if not self.has_change(run, one)]
        return [*([self.new] if self.new is not None and self.new.name not in outcomes else []), *old]


def compare(
    runs: Sequence[Run],
    *,
    new_task: str | None = None,
    old_tasks: Sequence[str] | None = None,
    base: Path | None = None,
) -> Comparison:
    """
    Args:
        new_task: the name of the new task or probe, where the evaluations have several.
        old_tasks: names of the trade-off's old tasks and probes; None: all old tasks, of those with different units the ones in points,
            without those at chance unless all are.
        base: folder of the pretrained model's results, where they are no longer where the runs' results say; or the folder that it is in.

    Raises:
        UserError: the runs cannot be compared: other new tasks, other pretrained weights or models, or evaluations with other settings; or a
            name of a task is not known, or the old tasks have different units.
    """
    check_equal(
        {base_builder(run.config): run for run in runs if run.config},
        "model: {run} has {one}, {other_run} has {other}; their changes have no common base: report on one model at a time",
    )
    bases = _read_bases(runs, base)
    chosen = select_measures(runs, new_task=new_task, old_tasks=old_tasks)
    outcomes = [_outcomes_of_run(run, chosen.measures, bases) for run in runs]
    old, others = ([_with_chance(one, outcomes) for one in those] for those in (chosen.old, chosen.other_old))
    if old_tasks is None and not all(one.is_at_chance for one in old):
        others = [*(one for one in old if one.is_at_chance), *others]
        old = [one for one in old if not one.is_at_chance]
    return Comparison(chosen.new, old, others, chosen.reliability, runs, outcomes, bases.results)


def _with_chance(measure: Measure, outcomes: Sequence[Mapping[str, Outcome]]) -> Measure:
    """Says whether the pretrained model is at chance, from where there is nothing to forget."""
    base = next((one[measure.name].base for one in outcomes if measure.name in one), None)
    if measure.chance is None or base is None or base.low is None or not measure.is_higher_better:
        return measure
    return replace(measure, is_at_chance=base.low <= measure.chance)


def _outcomes_of_run(run: Run, measures: Sequence[Measure], bases: _Bases) -> dict[str, Outcome]:
    every = (_probe_outcome(run, one) if one.is_probe else _task_outcome(run, one, bases) for one in measures)
    found = {outcome.measure.name: outcome for outcome in every if outcome is not None}
    tested = {name: outcome.p_value for name, outcome in found.items() if outcome.p_value is not None}
    for name, p_value in zip(tested, holm(list(tested.values())), strict=True):
        found[name] = replace(found[name], p_holm=p_value)
    return found


def _probe_outcome(run: Run, measure: Measure) -> Outcome | None:
    """At the best epoch's end, or the last one up to the step of the best model; without either, at the last evaluation."""
    key = measure.key
    lines = [line for line in run.metrics if line.get(key) is not None]
    later = [line for line in lines if line["step"] > 0]
    if run.best_step is not None:
        later = [line for line in later if line["step"] <= run.best_step] or later
    chosen = [line for line in later if run.best_epoch is not None and line.get("epoch") == run.best_epoch] or later
    if not chosen:
        return None
    value, step = chosen[-1][key], chosen[-1]["step"]
    change = chosen[-1].get(f"{key}_change")  # on the same rows, where a resumed run has others than at step 0
    before = next((line[key] for line in lines if line["step"] == 0), None) if change is None else value - change
    if before is None:
        return Outcome(measure, Estimate(value), step=step)
    return Outcome(measure, Estimate(value), Estimate(before), Estimate(value - before), step=step)


def _task_outcome(run: Run, measure: Measure, bases: _Bases) -> Outcome | None:
    suite = next((name for name in (measure.source, *run.results) if measure.name in _tasks(run.results, name)), None)
    if suite is None or run.results[suite].tasks[measure.name].score is None:
        return None
    task = run.results[suite].tasks[measure.name]
    samples, mean = _read_scores(run.result_path(suite).parent, task, measure)
    outcome = Outcome(
        measure, _estimate(mean), n=mean.n, n_clusters=mean.n_clusters, samples=samples, others=task.others
    )
    if run.results[suite].base is None or measure.name not in _tasks(bases.results, suite):
        return outcome
    key = (bases.file(run, suite).parent, measure.name)
    if key not in bases.read:
        bases.read[key] = _read_scores(key[0], bases.results[suite].tasks[measure.name], measure)
    base, before = bases.read[key]
    try:
        delta = paired_delta(base, samples)
    except UserError as error:
        raise UserError(f"{run.folder}, {measure.name}: {error}") from error
    outcome = replace(outcome, base=_estimate(before), base_samples=base, delta=_estimate(delta))
    # The base's divergence from itself is 0 and no other is below it: a test would say only how many documents there are.
    return outcome if measure.metric == "kl" else replace(outcome, p_value=delta.p_value, test=delta.test)


def _estimate(one: Mean) -> Estimate:
    """Without what is NaN: of a single document."""
    spread = one.standard_error, one.low, one.high
    return Estimate(one.mean, *(each if math.isfinite(each) else None for each in spread))


def _tasks(results: Mapping[str, SuiteResult], suite: str) -> Mapping[str, TaskResult]:
    return results[suite].tasks if suite in results else {}


def _read_scores(folder: Path, task: TaskResult, measure: Measure) -> tuple[list[Sample], Mean]:
    """What the report needs of the samples: responses and log-likelihoods of all runs at once would fill the memory."""
    samples = [{key: one[key] for key in _KEPT if key in one} for one in read_samples(folder, task)]
    return samples, mean_interval(samples, is_share=measure.unit == POINTS)


def _read_bases(runs: Sequence[Run], folder: Path | None) -> _Bases:
    bases = _Bases(folder)
    first: dict[str, tuple[Run, SuiteResult]] = {}
    weights: dict[str, Run] = {}
    for run in runs:
        for suite, result in run.results.items():
            other_run, other = first.setdefault(suite, (run, result))
            _check_settings(suite, run.folder, result, other_run.folder, other)
            if result.base is None:
                continue
            path = bases.file(run, suite)
            found = read_result(path)
            _check_settings(suite, run.folder, result, path.parent, found)
            weights.setdefault(found.weights, run)
            check_equal(
                weights,
                "base: {run} and {other_run} were compared with different pretrained weights ({one:.12} and {other:.12}); "
                "report on runs of one pretrained model at a time",
            )
            bases.results[suite] = found
    return bases


def _check_settings(suite: str, name: Path, result: SuiteResult, other_name: Path, other_result: SuiteResult) -> None:
    # Where the data lie may differ: the documents' hashes have to be the same.
    for key in sorted((result.settings.keys() | other_result.settings.keys()) - {"data"}):
        value, other_value = result.settings.get(key), other_result.settings.get(key)
        if value != other_value:
            raise UserError(
                f"{suite}: {name} was evaluated with {key}={value}, {other_name} with {key}={other_value}; evaluate both alike"
            )
    for task in result.tasks.keys() & other_result.tasks.keys():
        definition, other_definition = result.tasks[task].definition, other_result.tasks[task].definition
        if result.is_base != other_result.is_base:  # the base model's answers are not judged
            definition, other_definition = answers_definition(definition), answers_definition(other_definition)
        if definition != other_definition:
            raise UserError(
                f"{suite}: {task} has another definition in {name} than in {other_name} (such as a chat template in one of them); "
                "evaluate both alike"
            )
