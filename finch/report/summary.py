"""What the report says in a paragraph: only differences whose 95% interval leaves 0 out are called one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finch.evaluation.results import POINTS
from finch.report.formatting import digits, estimate, number
from finch.report.front import Front
from finch.report.measures import Comparison, Estimate
from finch.report.selection import Measure
from finch.report.settings import Point, Setting, TradeOff
from finch.report.tables import Names, flip, shown_sign, units
from finch.sweep.grid import EVALUATED, FINISHED


@dataclass(frozen=True)
class Summary:
    """The opening, an item for each method, and what can be said of them at an equal new-task score."""

    opening: str
    items: Sequence[str] = ()
    closing: str = ""


def summarize(comparison: Comparison, trade_off: TradeOff, front: Front, names: Names) -> Summary:
    methods = {run.method: None for run in comparison.runs}
    num_seeds = len({run.seed for run in comparison.runs if run.seed is not None})
    labels = [names.styles[method].label for method in names.styles if method in methods]
    seeds = f", {num_seeds} seeds" if num_seeds > 1 else ", one seed" if num_seeds else ""
    runs = f"{len(comparison.runs)} runs" if len(comparison.runs) > 1 else "One run"
    opening = f"{runs} of {join(labels)}{seeds}."
    new, old = comparison.new, comparison.old
    if new is None or not old or not trade_off.points:
        return Summary(f"{opening} {_what_is_missing(comparison)}")
    if trade_off.base is not None:
        value = number(shown_sign(new) * trade_off.base.new.value, digits(new.unit))
        opening += f" Before tuning the model has {value}{_unit(new)} on {new.name} ({new.metric})."
    tasks = f"the mean change of {len(old)} old tasks" if len(old) > 1 else f"the change of {old[0].name}"
    opening += f" For each method, its setting with the best score there, and {tasks}:"
    return Summary(opening, _learned(comparison, trade_off, names), _at_equal_score(comparison, front, names))


def join(words: Sequence[str]) -> str:
    return " and ".join(words) if len(words) < 3 else ", ".join(words[:-1]) + " and " + words[-1]


def _what_is_missing(comparison: Comparison) -> str:
    if comparison.new is None and not comparison.old:
        return "Neither an evaluation nor a probe measures what was learned or forgotten yet: this report has training curves only."
    if comparison.new is None:
        return "Nothing measures the new task yet (an evaluation of it, or a probe with task: True), so there is no trade-off."
    if not comparison.old:
        return "Nothing measures old tasks yet (the suite forgetting, or probes), so there is no trade-off."
    return "No run has both the new task and all old tasks yet, so there is no trade-off."


def _learned(comparison: Comparison, trade_off: TradeOff, names: Names) -> list[str]:
    """Each method's setting with the best new-task score."""
    new, old = comparison.new, comparison.old
    assert new is not None
    best: dict[str, Point] = {}
    for point in trade_off.points:
        assert point.setting is not None
        method = point.setting.method
        if method not in best or point.new.value > best[method].new.value:
            best[method] = point
    items = []
    tasks = "old tasks" if len(old) > 1 else old[0].name
    for method in names.styles:
        if method in best and (setting := best[method].setting) is not None:
            learned = estimate(flip(best[method].new, shown_sign(new)), digits(new.unit), unit=_unit(new))
            change = flip(best[method].old, shown_sign(old[0]))
            unit = f" {units(old, is_change=True)}"
            text = f"{estimate(change, digits(old[0].unit), sign=True, unit=unit)}"
            is_unclear = change.low is not None and change.high is not None and change.low <= 0 <= change.high
            clause = ", not distinguishable from 0" if is_unclear else ""
            items.append(f"{names.setting(setting)}: {learned} on {new.name}; {tasks} {text}{clause}")
    return items


def _unit(measure: Measure) -> str:
    return "%" if measure.unit == POINTS else " nats a token"


def _at_equal_score(comparison: Comparison, front: Front, names: Names) -> str:
    """At the highest score where half of the methods that can be compared with the reference at all can be."""
    if len(front.methods) < 2:
        return ""
    comparable = [
        sum(values[position].difference is not None for values in front.methods.values())
        for position in range(len(front.scores))
    ]
    if not any(comparable):
        return "No two methods reach a common new-task score, so their forgetting cannot be compared."
    position = max(index for index, count in enumerate(comparable) if 2 * count >= max(comparable))
    differences = {
        method: values[position].difference
        for method, values in front.methods.items()
        if values[position].difference is not None
    }
    new, old = comparison.new, comparison.old
    assert new is not None
    sign, places = shown_sign(old[0]), digits(old[0].unit)
    better, worse, unclear, bare = [], [], [], []
    for method, difference in differences.items():
        assert difference is not None
        label = names.styles[method].label
        size = Estimate(abs(difference.value))
        if difference.low is None or difference.high is None:
            bare.append(f"{label} {estimate(flip(difference, sign), places, sign=True)}")
        elif difference.low > 0:
            better.append(
                f"{label} by {number(size.value, places)} [{number(difference.low, places)}, {number(difference.high, places)}]"
            )
        elif difference.high < 0:
            worse.append(
                f"{label} by {number(size.value, places)} [{number(-difference.high, places)}, {number(-difference.low, places)}]"
            )
        else:
            unclear.append(label)
    reference = names.styles[str(front.reference)].label
    score = (
        f"{number(shown_sign(new) * front.scores[position], digits(new.unit))}{'%' if new.unit == POINTS else ' nats'}"
    )
    unit = units(old, is_change=True)
    sentences = [f"At an equal {score} on {new.name}, compared with {reference}:"]
    if better:
        sentences.append(f"less is forgotten by {join(better)} {unit};")
    if worse:
        sentences.append(f"more is forgotten by {join(worse)} {unit};")
    if unclear:
        sentences.append(f"no difference can be shown for {join(unclear)};")
    if bare:
        sentences.append(f"the change of the old tasks differs by {join(bare)} {unit}, with no interval;")
    missing = [names.styles[one].label for one, values in front.methods.items() if values[position].change is None]
    if missing:
        sentences.append(f"{join(missing)} {'does' if len(missing) == 1 else 'do'} not reach this score;")
    text = " ".join(sentences)
    return text[:-1] + "." + (" Intervals are 95%, each for one comparison." if better or worse or unclear else "")


def notes(comparison: Comparison, settings: Sequence[Setting], names: Names) -> list[str]:
    """What a reader has to know before comparing numbers."""
    found = []
    runs = comparison.runs
    if comparison.old and comparison.other_old:
        found.append(_which_old_tasks(comparison))
    unfinished = [
        run
        for run in runs
        if run.config.get("epochs")
        and run.metrics
        and run.finished_epochs < int(run.config["epochs"])
        and run.status not in (FINISHED, EVALUATED)
    ]
    if unfinished:
        found.append(
            f"{len(unfinished)} of {len(runs)} runs have not ended their last epoch; their numbers are those of now."
        )
    waiting = [run for run in runs if not run.metrics and not run.results]
    if waiting:
        found.append(f"{len(waiting)} of {len(runs)} runs {'have' if len(waiting) > 1 else 'has'} no steps yet.")
    found += _absent_runs(comparison, settings, names)
    probes = [measure.name for measure in (comparison.new, *comparison.old) if measure is not None and measure.is_probe]
    if probes:
        found.append(
            f"{join(probes)}: probes stand in for evaluations. They are small, have no intervals over documents, and their numbers are those at the best epoch, else the last."
        )
    precisions = sorted({str(run.config["dtype"]) for run in runs if run.config.get("dtype")})
    if len(precisions) > 1:
        found.append(
            f"The runs were trained in different precisions ({join(precisions)}): rounding in bf16 acts like a smaller learning rate, so compare fronts, not equal rates."
        )
    versions: dict[str, set[str]] = {}
    for run in runs:
        for result in run.results.values():
            for package, version in result.versions.items():
                versions.setdefault(package, set()).add(version)
    mixed = [f"{package} {join(sorted(those))}" for package, those in versions.items() if len(those) > 1]
    if mixed:
        found.append(f"The evaluations were made with different versions: {'; '.join(mixed)}.")
    limits = {result.settings.get("limit") for run in runs for result in run.results.values()} - {None}
    if limits:
        found.append(
            f"Evaluations are limited to {join(sorted(map(str, limits)))} documents a task: numbers of full tasks differ."
        )
    return found


def _which_old_tasks(comparison: Comparison) -> str:
    def by_unit(measures: Sequence[Measure]) -> str:
        names: dict[str, list[str]] = {}
        for measure in measures:
            names.setdefault(measure.unit, []).append(measure.name)
        return ", ".join(f"{join(those)} in {unit}" for unit, those in names.items())

    old, others = comparison.old, comparison.other_old
    has_no_common_unit = {one.unit for one in old}.isdisjoint(one.unit for one in others)
    return (
        f"The trade-off's old {'tasks are' if len(old) > 1 else 'task is'} {by_unit(old)}. In the tables of changes alone: {by_unit(others)}"
        + (", since points and nats have no common mean" if has_no_common_unit else "")
        + ". The option --old-tasks chooses others."
    )


def _absent_runs(comparison: Comparison, settings: Sequence[Setting], names: Names) -> list[str]:
    """Runs that have no place in the trade-off, by what they lack."""
    if comparison.new is None or not comparison.old:
        return []
    of_lack: dict[tuple[str, ...], dict[str, int]] = {}
    for setting in settings:
        for run in setting.runs:
            lack = tuple(measure.name for measure in comparison.lacks(run))
            if lack:
                counts = of_lack.setdefault(lack, {})
                counts[names.setting(setting)] = counts.get(names.setting(setting), 0) + 1
    found = []
    for lack, counts in of_lack.items():
        those = "; ".join(name + (f" ({count} seeds)" if count > 1 else "") for name, count in counts.items())
        total = sum(counts.values())
        verbs = ("lack", "are") if total > 1 else ("lacks", "is")
        found.append(
            f"{total} of {len(comparison.runs)} runs {verbs[0]} {join(lack)} and {verbs[1]} absent from the trade-off: {those}."
        )
    return found
