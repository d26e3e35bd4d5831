"""What tuned models forgot, skill by skill, on rows that finch brings along: no hub, no data and no judge.

Two measures. The KL divergence from the pretrained model on that model's own greedy answers, in nats per token, sees a change long before
a score does. And where one of four answers is right: how often it has the largest log-likelihood per character.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torchtune.data import Message
from torchtune.datasets._sft import SFTTransform

import finch
from finch.base.errors import UserError
from finch.base.files import make_folder
from finch.base.log import logger
from finch.base.progress import Progress
from finch.data.prompts import Sample, plain, prompt_turns, tokenize_prompts
from finch.data.skills import skill_rows
from finch.evaluation.loading import SHORT, hash_values, hash_weights, load_model
from finch.evaluation.model_folders import ModelFolder, labels
from finch.evaluation.results import (
    NATS,
    OLD,
    SuiteResult,
    TaskResult,
    read_result,
    read_samples,
    write_result,
)
from finch.evaluation.statistics import mean_interval, paired_delta
from finch.evaluation.tasks.task import mean, scored
from finch.integrations.self_replay import (
    BATCH_ROWS,
    Answer,
    answer_kl,
    measured_answers,
    read_answers,
    save_answers,
)
from finch.models import auto_tokenizer
from finch.objectives import IGNORE_INDEX

SUITE, ANSWERS = "skills", "skills.answers.safetensors"
MAX_NEW_TOKENS, TOP_K = 32, 512
CPU_ROWS = 8
"""Of each skill on a CPU, where all of them take long."""
_VERSIONS = ("torch", "transformers")


@dataclass(frozen=True)
class SkillRows:
    """finch's rows, tokenized: of each its skill and prompt, and where an answer is right a sample for each choice."""

    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    choices: list[list[Sample]]
    stop_tokens: list[int]

    @property
    def skills(self) -> list[str]:
        return sorted({row["skill"] for row in self.rows})


@dataclass(frozen=True)
class Skill:
    """What one model lost of one skill.

    Attributes:
        kl, kl_low, kl_high: the divergence from the base on its own answers, in nats per token, and its 95% interval over prompts.
        n: prompts.
        before, after: accuracies of the base and the tuned model; None where the skill has no right answers.
        change, change_low, change_high: their difference and its paired interval; ``change_low`` is None where all rows changed alike.
        n_choices: questions.
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


def read_skills(folder: Path, limit: int | None) -> SkillRows:
    """The rows, ``limit`` of each skill, as the tokenizer of a model's folder renders them for training."""
    rows = skill_rows()
    rows = rows if limit is None else rows[: limit * len({row["skill"] for row in rows})]  # one of each skill in turn
    tokenizer = auto_tokenizer(str(folder))
    transform = SFTTransform(model_transform=tokenizer)
    prompts = tokenize_prompts("skills", "finch's rows", rows, tokenizer, limit=None, max_new_tokens=MAX_NEW_TOKENS)
    choices: list[list[Sample]] = []
    for row in rows:
        turns = prompt_turns(row, tokenizer)["turns"]
        ends = [Message(role="assistant", content=choice) for choice in row.get("choices", ())]
        choices.append([plain(transform({"messages": [*turns, end]})) for end in ends])
    return SkillRows(rows, prompts, choices, tokenizer.stop_tokens)


def measure(
    base: ModelFolder,
    tuned: Sequence[ModelFolder],
    rows: SkillRows,
    *,
    out: Path,
    dtype: str,
    device: torch.device,
    trust: bool,
) -> list[list[Skill]]:
    """Measures each tuned model, and the base where no earlier call has, and keeps the results; those that are there are read.

    Args:
        out: for results that no run owns.
        dtype: a key of ``finch.evaluation.loading.DTYPES``.
        trust: the tuned runs are the user's own, so that results may be written through their links.

    Returns:
        Of each tuned model its skills, the most forgotten first.
    """
    settings: dict[str, str | int | float | bool | None] = {
        "dtype": dtype,
        "rows": hash_values(rows.prompts, rows.choices)[:SHORT],
        "max_new_tokens": MAX_NEW_TOKENS,
    }
    folders, weights = [base, *tuned], [hash_weights(folder) for folder in (base, *tuned)]
    outputs = [
        folder.output(out, hash_values(digest, settings)[:SHORT])
        for folder, digest in zip(folders, weights, strict=True)
    ]
    missing = [not _is_done(output, digest, settings) for output, digest in zip(outputs, weights, strict=True)]
    answers_file = outputs[0] / ANSWERS
    if any(missing) and not answers_file.is_file():
        missing[0] = True
    answers: list[Answer] = []
    for folder, output, digest, is_missing in zip(folders, outputs, weights, missing, strict=True):
        if not is_missing:
            logger.info(f"{output / SUITE}.json is reused")
            continue
        make_folder(folder.place(output, out, trust=trust))
        model = load_model(folder, dtype, device)
        if folder is base:
            answers = list(_answers(model, rows))
            save_answers(answers, answers_file)
        answers = answers or read_answers(answers_file)
        samples = _samples(model, rows, answers, folder.label)
        del model
        result = SuiteResult(
            suite=SUITE,
            model=str(folder.path.resolve()),
            weights=digest,
            is_base=folder is base,
            base=None if folder is base else os.path.relpath(outputs[0] / f"{SUITE}.json", output),
            settings=settings,
            versions={"finch": finch.__version__, **{name: importlib.metadata.version(name) for name in _VERSIONS}},
            tasks={name: _task(name, each) for name, each in samples.items()},
        )
        try:
            write_result(output, result, samples)
        except ValueError as error:  # NaN or infinity, which JSON cannot hold
            raise UserError(f"{folder} has numbers that are not finite ({error}); nothing is written") from error
    return [_compare(outputs[0], output) for output in outputs[1:]]


def _is_done(output: Path, weights: str, settings: dict[str, Any]) -> bool:
    path = output / f"{SUITE}.json"
    if not path.exists():
        return False
    result = read_result(path)
    return (result.weights, result.settings) == (weights, settings)


def _answers(model: Any, rows: SkillRows) -> Iterator[Answer]:
    progress = Progress(len(rows.prompts), is_shown=True, leave=False)
    progress.set_title("skills: the base model's own answers")
    for start in range(0, len(rows.prompts), BATCH_ROWS):
        prompts = rows.prompts[start : start + BATCH_ROWS]
        yield from measured_answers(
            model, prompts, stop_tokens=rows.stop_tokens, max_new_tokens=MAX_NEW_TOKENS, top_k=TOP_K
        )
        progress.advance(len(prompts))
    progress.close()


def _samples(model: Any, rows: SkillRows, answers: Sequence[Answer], label: str) -> dict[str, list[dict[str, Any]]]:
    """By skill, of each row the mean KL over its answer's tokens, and where one choice is right whether it has the largest log-likelihood per
    character, as lm-eval's acc_norm."""
    progress = Progress(len(rows.rows), is_shown=True, leave=False)
    progress.set_title(f"skills: {label}: answers that are right or wrong")
    found: dict[str, list[dict[str, Any]]] = {skill: [] for skill in rows.skills}
    sums = answer_kl(model, answers).double().tolist()
    for number, (row, choices, answer, kl) in enumerate(zip(rows.rows, rows.choices, answers, sums, strict=True)):
        sample = {"doc_id": number, "doc_hash": hash_values(row)[:SHORT], "score": kl / len(answer.top)}
        if choices:
            losses = _losses(model, choices)
            scores = [-loss / len(choice) for loss, choice in zip(losses, row["choices"], strict=True)]
            sample["right"] = float(row["choices"][scores.index(max(scores))] == row["answer"])
        found[row["skill"]].append(sample)
        progress.advance(1)
    progress.close()
    return found


@torch.no_grad()
def _losses(model: Any, samples: Sequence[Sample]) -> list[float]:
    """[choices] the sum of the targets' cross-entropies, in nats; the prompt that the choices share is read once."""
    first_target = min(next(i for i, label in enumerate(sample["labels"]) if label >= 0) for sample in samples)
    columns = takewhile(
        lambda column: len({*column}) == 1, zip(*(sample["tokens"] for sample in samples), strict=False)
    )
    prompt = [column[0] for column in columns][:first_target]
    output = model(input_ids=torch.tensor([prompt], device=model.device), use_cache=True)
    output.past_key_values.batch_repeat_interleave(len(samples))
    tokens, labels, mask = (
        pad_sequence([torch.tensor(each) for each in rows], True, filler).to(model.device)
        for rows, filler in (
            ([sample["tokens"][len(prompt) :] for sample in samples], 0),
            ([sample["labels"][len(prompt) :] for sample in samples], IGNORE_INDEX),
            ([[1] * len(sample["tokens"]) for sample in samples], 0),
        )
    )
    logits = model(input_ids=tokens, attention_mask=mask, past_key_values=output.past_key_values).logits
    # The first token after the prompt is predicted from the prompt's last place.
    before = output.logits[:, -1:].expand(len(samples), -1, -1)
    logits = torch.cat([before, logits[:, :-1]], 1).float()
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1).tolist()


def _task(skill: str, samples: list[dict[str, Any]]) -> TaskResult:
    return TaskResult(
        role=OLD,
        metric="kl",
        definition=f"finch's rows of {skill}: KL divergence from the base on its own greedy answers, mean over tokens, then over prompts",
        **scored(samples),
        samples=f"{SUITE}.{skill}.jsonl",
        is_higher_better=False,
        others={"accuracy": mean(samples, "right")},
        unit=NATS,
    )


def _compare(base: Path, tuned: Path) -> list[Skill]:
    before, after = (read_result(folder / f"{SUITE}.json") for folder in (base, tuned))
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
            low, high = (None, None) if math.isnan(delta.low) else (delta.low, delta.high)  # no row has changed
            accuracy = {"before": mean(one, "right"), "after": mean(other, "right"), "change": delta.mean}
            accuracy |= {"change_low": low, "change_high": high, "n_choices": delta.n}
        found.append(Skill(name, kl.mean, kl.low, kl.high, kl.n, **accuracy))
    return sorted(found, key=lambda each: -each.kl)


def table(skills: Sequence[Skill]) -> list[list[str]]:
    """Rows of text, the first one the columns' names."""
    rows = [["skill", "KL, nats per token [95%]", "n", "right before", "after", "change, points [95%]", "n"]]
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
        if low is not None and high is not None and low <= 0 <= high:
            interval += " no change can be shown"
        rows.append(
            [each.skill, *kl, f"{100 * each.before:.1f}", f"{100 * each.after:.1f}", interval, str(each.n_choices)]
        )
    return rows


def beyond(skills: Sequence[Skill], max_kl: float | None, max_drop: float | None) -> list[str]:
    """A line for each skill whose whole interval lies beyond a limit; ``max_drop``: points of accuracy."""
    found = [
        f"{each.skill}: KL {each.kl:.3f} [{each.kl_low:.3f}, {each.kl_high:.3f}] is above --max-kl={max_kl:g}"
        for each in skills
        if max_kl is not None and each.kl_low > max_kl
    ]
    return found + [
        f"{each.skill}: accuracy fell by {-100 * (each.change or 0):.1f} points [{-100 * each.change_high:.1f}, {-100 * (each.change_low or 0):.1f}], more than --max-drop={max_drop:g}"
        for each in skills
        if max_drop is not None and each.change_high is not None and -100 * each.change_high > max_drop
    ]


def as_json(tuned: Sequence[ModelFolder], skills: Sequence[Sequence[Skill]]) -> list[dict[str, Any]]:
    return [
        {"model": label, "skills": [asdict(each) for each in one]}
        for label, one in zip(labels(tuned), skills, strict=True)
    ]
