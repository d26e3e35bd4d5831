"""What tuned models forgot, skill by skill, on rows that finch brings along: no hub, no data and no judge.

Two measures. The KL divergence from the pretrained model on that model's own greedy answers, in nats per token, sees a change long before
a score does. And where one of four answers is right: how often it has the largest log-likelihood per character.

Models of different tokenizers have no distributions over the same tokens. The first measure is then how much more the answers cost as text: the
rise of their loss, in nats per character.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from finch.base.log import logger
from finch.base.progress import Progress
from finch.data.prompts import Sample, plain, prompt_turns, tokenize_prompts
from finch.data.skills import skill_rows
from finch.evaluation.loading import PROMPT_DAY, SHORT, hash_values, hash_weights, load_model
from finch.evaluation.model_folders import ModelFolder
from finch.evaluation.results import (
    NATS,
    NATS_PER_CHARACTER,
    OLD,
    SuiteResult,
    TaskResult,
    base_path,
    read_result,
    read_samples,
    write_result,
)
from finch.evaluation.skill_changes import SUITE
from finch.evaluation.tasks.task import mean, scored
from finch.integrations.self_replay import (
    BATCH_ROWS,
    Answer,
    answer_kl,
    answer_tokens,
    measured_answers,
    read_answers,
    save_answers,
)
from finch.models import auto_tokenizer
from finch.models.chat_tokenizer import TOKENIZER
from finch.objectives import IGNORE_INDEX

ANSWERS = "skills.answers.safetensors"
MAX_NEW_TOKENS, TOP_K = 32, 512
CPU_ROWS = 8
"""Of each skill on a CPU, where all of them take long."""
MOVED = 2
"""Prompts of a skill whose answers are kept of both models."""
_VERSIONS = ("torch", "transformers")


@dataclass(frozen=True)
class SkillRows:
    """finch's rows, tokenized: of each its skill and prompt, and where an answer is right a sample for each choice."""

    rows: list[dict[str, Any]]
    prompts: list[list[int]]
    choices: list[list[Sample]]
    tokenizer: Any

    @property
    def skills(self) -> list[str]:
        return sorted({row["skill"] for row in self.rows})


def read_skills(folder: ModelFolder, limit: int | None) -> SkillRows:
    """The rows, ``limit`` of each skill, as the model's tokenizer renders them for training; an adapter's is its base's where it has none."""
    rows = skill_rows()
    rows = rows if limit is None else rows[: limit * len({row["skill"] for row in rows})]  # one of each skill in turn
    has_tokenizer = (folder.path / TOKENIZER).is_file() or folder.base is None
    tokenizer = auto_tokenizer(str(folder.path if has_tokenizer else folder.base), date=str(PROMPT_DAY))
    transform = SFTTransform(model_transform=tokenizer)
    prompts = tokenize_prompts("skills", "finch's rows", rows, tokenizer, limit=None, max_new_tokens=MAX_NEW_TOKENS)
    choices: list[list[Sample]] = []
    for row in rows:
        turns = prompt_turns(row, tokenizer)["turns"]
        ends = [Message(role="assistant", content=choice) for choice in row.get("choices", ())]
        choices.append([plain(transform({"messages": [*turns, end]})) for end in ends])
    return SkillRows(rows, prompts, choices, tokenizer)


def measure(
    base: ModelFolder,
    tuned: Sequence[ModelFolder],
    *,
    limit: int | None,
    out: Path,
    dtype: str,
    device: torch.device,
    trust: bool,
    by_text: bool = False,
) -> list[Path]:
    """Measures each tuned model, and the base where no earlier call has, and keeps the results; those that are there are read.

    Args:
        limit: rows of each skill; None: all.
        out: for results that no run owns.
        dtype: a key of ``finch.evaluation.loading.DTYPES``.
        trust: the tuned runs are the user's own, so that results may be written through their links.
        by_text: the tokenizers differ.

    Returns:
        Of each tuned model the folder of its results.

    Raises:
        UserError: the rows do not fit a model's chat template; numbers that are not finite; answers without a text, where that counts.
    """
    # The tuned model's template is the one that it was trained with.
    rows = read_skills(base if by_text else tuned[0], limit)
    settings: dict[str, str | int | float | bool | None] = {
        "dtype": dtype,
        "rows": hash_values(rows.prompts, rows.choices)[:SHORT],
        "max_new_tokens": MAX_NEW_TOKENS,
        **({"by_text": True} if by_text else {}),
    }
    folders, weights = [base, *tuned], [hash_weights(folder) for folder in (base, *tuned)]
    outputs = [
        folder.output(out, hash_values(digest, settings)[:SHORT])
        for folder, digest in zip(folders, weights, strict=True)
    ]
    bases = [None, *(outputs[0] / f"{SUITE}.json" for _ in tuned)]
    missing = [not _is_done(*each, settings) for each in zip(outputs, weights, bases, strict=True)]
    answers_file = outputs[0] / ANSWERS
    if any(missing) and not answers_file.is_file():
        missing[0] = True
    answers: list[Answer] = []
    for folder, output, digest, is_missing in zip(folders, outputs, weights, missing, strict=True):
        if not is_missing:
            logger.info(f"{output / SUITE}.json is reused")
            continue
        folder.make_place(output, out, trust=trust)
        model = load_model(folder, dtype, device)
        if folder is base:
            answers = list(_answers(model, rows))
            save_answers(answers, answers_file)
        answers = answers or read_answers(answers_file)
        texts = [rows.tokenizer.decode(answer.tokens[-len(answer.top) :].tolist()) for answer in answers]
        if by_text:
            own = rows if folder is base else read_skills(folder, limit)
            before = None if folder is base else _losses_of(outputs[0])
            scores = _rises(model, own, texts, before)
        else:
            own, sums = rows, answer_kl(model, answers).double().tolist()
            scores = [{"score": kl / len(answer.top)} for kl, answer in zip(sums, answers, strict=True)]
        samples = _samples(model, own, scores, folder.label)
        if folder is not base:
            _keep_moved(model, own, texts, samples)
        del model
        result = SuiteResult(
            suite=SUITE,
            model=str(folder.path.resolve()),
            weights=digest,
            is_base=folder is base,
            base=None if folder is base else os.path.relpath(outputs[0] / f"{SUITE}.json", output),
            settings=settings,
            versions={"finch": finch.__version__, **{name: importlib.metadata.version(name) for name in _VERSIONS}},
            tasks={name: _task(name, each, by_text) for name, each in samples.items()},
        )
        try:
            write_result(output, result, samples)
        except ValueError as error:  # NaN or infinity, which JSON cannot hold
            raise UserError(f"{folder} has numbers that are not finite ({error}); nothing is written") from error
    return outputs[1:]


def _is_done(output: Path, weights: str, base: Path | None, settings: dict[str, Any]) -> bool:
    """Whether there are numbers of the model, by the same base's answers."""
    path = output / f"{SUITE}.json"
    if not path.exists():
        return False
    result, found = read_result(path), None if base is None else Path(os.path.abspath(base))
    earlier = base_path(path.absolute(), result)
    return (result.weights, result.settings, earlier) == (weights, settings, found)


def _answers(model: Any, rows: SkillRows) -> Iterator[Answer]:
    progress = Progress(len(rows.prompts), is_shown=True, leave=False)
    progress.set_title("skills: the base model's own answers")
    for start in range(0, len(rows.prompts), BATCH_ROWS):
        prompts = rows.prompts[start : start + BATCH_ROWS]
        yield from measured_answers(
            model, prompts, stop_tokens=rows.tokenizer.stop_tokens, max_new_tokens=MAX_NEW_TOKENS, top_k=TOP_K
        )
        progress.advance(len(prompts))
    progress.close()


def _samples(
    model: Any, rows: SkillRows, scores: Sequence[dict[str, Any]], label: str
) -> dict[str, list[dict[str, Any]]]:
    """By skill, of each row its score, and where one choice is right whether it has the largest log-likelihood per character, as lm-eval's
    acc_norm."""
    progress = Progress(len(rows.rows), is_shown=True, leave=False)
    progress.set_title(f"skills: {label}: answers that are right or wrong")
    found: dict[str, list[dict[str, Any]]] = {skill: [] for skill in rows.skills}
    for number, (row, choices, score) in enumerate(zip(rows.rows, rows.choices, scores, strict=True)):
        sample = {"doc_id": number, "doc_hash": hash_values(row)[:SHORT], **score}
        if choices:
            losses = _losses(model, choices)
            each = [-loss / len(choice) for loss, choice in zip(losses, row["choices"], strict=True)]
            sample["right"] = float(row["choices"][each.index(max(each))] == row["answer"])
        found[row["skill"]].append(sample)
        progress.advance(1)
    progress.close()
    return found


def _rises(
    model: Any, rows: SkillRows, texts: Sequence[str], before: Mapping[int, float] | None
) -> list[dict[str, Any]]:
    """Of each answer that has a text its loss in nats per character, and as score what of it the base has not; ``before``: the base's."""
    if not any(texts):
        raise UserError("--base answers nothing to any prompt, so that nothing is compared; give another base")
    found: list[dict[str, Any]] = []
    for number, (prompt, text) in enumerate(zip(rows.prompts, texts, strict=True)):
        if not text:
            found.append({"score": None})
            continue
        answer = rows.tokenizer.encode(text)
        sample = {"tokens": [*prompt, *answer], "labels": [IGNORE_INDEX] * len(prompt) + answer}
        loss = _losses(model, [sample])[0] / len(text)
        found.append({"score": 0.0 if before is None else loss - before[number], "loss": loss})
    return found


def _losses_of(output: Path) -> dict[int, float]:
    tasks = read_result(output / f"{SUITE}.json").tasks.values()
    return {one["doc_id"]: one["loss"] for task in tasks for one in read_samples(output, task) if "loss" in one}


def _keep_moved(
    model: Any, rows: SkillRows, texts: Sequence[str], samples: Mapping[str, Sequence[dict[str, Any]]]
) -> None:
    """Adds both models' answers to the samples of each skill that moved most."""
    moved = [
        sample
        for each in samples.values()
        for sample in sorted((one for one in each if one["score"] is not None), key=lambda one: -one["score"])[:MOVED]
    ]
    prompts = [rows.prompts[sample["doc_id"]] for sample in moved]
    found = answer_tokens(model, prompts, stop_tokens=rows.tokenizer.stop_tokens, max_new_tokens=MAX_NEW_TOKENS)
    for sample, answer in zip(moved, found, strict=True):
        number = sample["doc_id"]
        turns = prompt_turns(rows.rows[number], rows.tokenizer)["turns"]
        sample["prompt"] = "\n".join(turn.text_content for turn in turns)
        sample["before"], sample["after"] = texts[number], rows.tokenizer.decode(answer)


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


def _task(skill: str, samples: list[dict[str, Any]], by_text: bool) -> TaskResult:
    measured = "KL divergence from the base on its own greedy answers, mean over tokens, then over prompts"
    if by_text:
        measured = "rise of the loss of the base's own greedy answers, per character of their text, mean over prompts"
    return TaskResult(
        role=OLD,
        metric="rise" if by_text else "kl",
        definition=f"finch's rows of {skill}: {measured}",
        **scored(samples),
        samples=f"{SUITE}.{skill}.jsonl",
        is_higher_better=False,
        others={"accuracy": mean(samples, "right")},
        unit=NATS_PER_CHARACTER if by_text else NATS,
    )
