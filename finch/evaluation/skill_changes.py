"""How much each skill has changed between a base and a tuned model, from their stored results: intervals, tables, limits, JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finch.evaluation.results import base_path, read_result, read_samples
from finch.evaluation.statistics import mean_interval, paired_delta

SUITE = "skills"
_LEVEL = 0.05
"""Of the exact test, since the bootstrap's interval of few rows is too narrow."""


@dataclass(frozen=True)
class Skill:
    """What one model lost of one skill.

    Attributes:
        kl, kl_low, kl_high: the divergence from the base on its own answers, in nats per token, and its 95% interval over prompts; of another
            tokenizer's model the rise of their loss, in nats per character.
        n: prompts.
        before, after: accuracies of the base and the tuned model; None where the skill has no right answers.
        change, change_low, change_high: their difference and its paired interval; ``change_low`` is None where no row has changed.
        n_choices: questions.
        p_value: of the exact test of no change.
        moved: ``prompt``, ``before`` and ``after`` of those that moved most: the answers of both models.
    """

    skill: str
    kl: float
    kl_low: float
    kl_high: float
    n: int
    before: float | None = None
    after: float | None = None
    change: float | None = None
    change_low: float | None = None
    change_high: float | None = None
    n_choices: int = 0
    p_value: float = 1.0
    moved: Sequence[dict[str, str]] = ()

    @property
    def has_changed(self) -> bool:
        """Whether a change of accuracy can be shown."""
        low, high = self.change_low, self.change_high
        return low is not None and high is not None and not low <= 0 <= high and self.p_value < _LEVEL


def compare(tuned: Path) -> list[Skill]:
    """What the model whose results lie in ``tuned`` lost of each skill, the most forgotten first."""
    path = tuned / f"{SUITE}.json"
    after = read_result(path)
    file = base_path(path, after)
    assert file is not None, "only a tuned model's results are compared"
    before, base = read_result(file), file.parent
    found = []
    for name, task in after.tasks.items():
        samples = read_samples(tuned, task)
        kl = mean_interval(samples, is_share=False)
        accuracy: dict[str, Any] = {}
        one, other = (
            [{**sample, "score": sample["right"]} for sample in each if "right" in sample]
            for each in (read_samples(base, before.tasks[name]), samples)
        )
        if other:
            delta = paired_delta(one, other)
            low: float | None = delta.low
            high: float | None = delta.high
            if math.isnan(delta.low):  # all rows have changed alike, or none has
                low = high = delta.mean or None
            accuracy = {"before": before.tasks[name].others["accuracy"], "after": task.others["accuracy"]}
            accuracy |= {"change": delta.mean, "change_low": low, "change_high": high, "n_choices": delta.n}
            accuracy["p_value"] = delta.p_value
        moved = [{key: one[key] for key in ("prompt", "before", "after")} for one in samples if "prompt" in one]
        found.append(Skill(name, kl.mean, kl.low, kl.high, kl.n, **accuracy, moved=moved))
    return sorted(found, key=lambda each: -each.kl)


def table(skills: Sequence[Skill], by_text: bool = False) -> list[list[str]]:
    """Rows of text, the first one the columns' names."""
    first = "rise of the loss, nats per character [95%]" if by_text else "KL, nats per token [95%]"
    rows = [["skill", first, "n", "right before", "after", "change, points [95%]", "n"]]
    for each in skills:
        kl = [f"{each.kl:.3f} [{each.kl_low:.3f}, {each.kl_high:.3f}]", str(each.n)]
        if each.before is None or each.after is None or each.change is None:
            rows.append([each.skill, *kl, "-", "", "", ""])
            continue
        low, high = each.change_low, each.change_high
        interval = (
            "no row changed"
            if low is None or high is None
            else f"{100 * each.change:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"
        )
        if low is not None and not each.has_changed:
            interval += f" no change can be shown (exact test: p = {each.p_value:.2f})"
        rows.append(
            [each.skill, *kl, f"{100 * each.before:.1f}", f"{100 * each.after:.1f}", interval, str(each.n_choices)]
        )
    return rows


def beyond(skills: Sequence[Skill], max_kl: float | None, max_drop: float | None) -> list[str]:
    """A line for each skill whose whole interval lies beyond a limit; ``max_drop``: points of accuracy, of a change that can be shown."""
    found = [
        f"{each.skill}: KL {each.kl:.3f} [{each.kl_low:.3f}, {each.kl_high:.3f}] is above --max-kl={max_kl:g}"
        for each in skills
        if max_kl is not None and each.kl_low > max_kl
    ]
    return found + [
        f"{each.skill}: accuracy fell by {-100 * (each.change or 0):.1f} points [{-100 * each.change_high:.1f}, {-100 * (each.change_low or 0):.1f}], more than --max-drop={max_drop:g}"
        for each in skills
        if max_drop is not None
        and each.change_high is not None
        and -100 * each.change_high > max_drop
        and each.has_changed
    ]


def as_json(models: Sequence[str], skills: Sequence[Sequence[Skill]], by_text: bool = False) -> list[dict[str, Any]]:
    """``models``: their labels. ``by_text``: what is under ``kl`` is the rise of the loss."""
    measure = "rise of the loss, nats per character" if by_text else "KL, nats per token"
    return [
        {"model": label, "measure": measure, "skills": [asdict(each) for each in one]}
        for label, one in zip(models, skills, strict=True)
    ]
