"""What finch evaluate does not have: losses and the KL divergence of each cell's model, row by row, with transformers and none of finch's own model code.

python -m studies.smollm2_tofu.score out/study/smooth --base BASE --data out/study/data

writes RUN/evaluation/losses.json and its samples for each trained cell, and the pretrained model's to SWEEP/base_losses/; a cell that has
them is skipped. A sample's score is its loss times rows / tokens of all rows: their mean is the mean over tokens.

    paraphrases        loss of the paraphrased answers to the paraphrased questions of the learned rows, nats per token
    held_out           the same of rows that are not learned
    train              loss of the learned answers
    own_answers        loss of the pretrained model's own greedy answers to IFEval prompts
    own_answers_kl     KL(pretrained || tuned) at the tokens of these answers, over the complete vocabulary
    stories            loss of stories
    endings            loss of HellaSwag's right endings
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

from finch.base.run_files import CELL, EVALUATION, chosen_model
from finch.evaluation.loading import hash_weights
from finch.evaluation.model_folders import ModelFolder
from finch.evaluation.results import NATS, NEW, OLD, Sample, SuiteResult, TaskResult, write_result
from finch.study.sweep.grid import EVALUATED, FINISHED, read_cell
from studies.smollm2_tofu.data import EQUATIONS

SUITE, BASE = "losses", "base_losses"
MAX_NEW_TOKENS = 64
TASKS = {  # role, definition
    "paraphrases": (NEW, "loss of the paraphrased answers to the paraphrased questions of the learned rows"),
    "held_out": (NEW, "loss of the answers of rows that are not learned, of TOFU paraphrased"),
    "train": (NEW, "loss of the learned answers"),
    "own_answers": (OLD, f"loss of the pretrained model's greedy answers (up to {MAX_NEW_TOKENS} tokens)"),
    "own_answers_kl": (OLD, "KL divergence from the pretrained model at the tokens of its greedy answers"),
    "stories": (OLD, "loss of stories"),
    "endings": (OLD, "loss of HellaSwag's right endings"),
}


@dataclass(frozen=True)
class Row:
    """Token ids; the last ``num_targets`` of them are scored."""

    tokens: list[int]
    num_targets: int


class Scorer:
    """Scores models on the study's rows.

    Args:
        base: the pretrained model's folder.
        data: of ``data.py``.
        batch_tokens: of a forward pass, padding included.
    """

    def __init__(self, base: Path, data: Path, *, batch_tokens: int = 4096) -> None:
        transformers.utils.logging.disable_progress_bar()
        self.base, self._data, self._batch_tokens = base, data, batch_tokens
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(base)
        self._model = self._load(base)
        self._end = int(self._model.config.eos_token_id)  # of a turn; tokenizers read from GGUF can name another one
        tasks = ("held_out", "train") if data.name == EQUATIONS else ("paraphrases", "held_out", "train")
        rows = {name: self._questions(f"{name}.jsonl") for name in tasks}
        rows["own_answers"] = self._own_answers()
        rows["stories"] = [self._story(row["text"]) for row in self._read("stories.jsonl")]
        rows["endings"] = [self._ending(row) for row in self._read("hellaswag/validation.jsonl")]
        self._rows = rows
        self._reference = self._log_probs(self._model, rows["own_answers"])
        self.versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}

    def score_base(self) -> dict[str, list[Sample]]:
        return self._score(self._model)

    def score(self, folder: Path) -> dict[str, list[Sample]]:
        """A task's samples, by task."""
        return self._score(self._load(folder))

    @torch.inference_mode()
    def _score(self, model: Any) -> dict[str, list[Sample]]:
        found: dict[str, list[Sample]] = {}
        for name, rows in self._rows.items():
            nats, kl = [0.0] * len(rows), [0.0] * len(rows)
            for indices, log_probs in self._batches(model, rows):
                for index, row_log_probs in zip(indices, log_probs, strict=True):
                    targets = torch.tensor(rows[index].tokens[-rows[index].num_targets :], device=self._device)
                    nats[index] = -float(row_log_probs.gather(1, targets[:, None]).double().sum())
                    if name == "own_answers":
                        before = self._reference[index].to(self._device)
                        kl[index] = float(F.kl_div(row_log_probs, before, reduction="sum", log_target=True))
            found[name] = _samples(rows, nats)
            if name == "own_answers":
                found["own_answers_kl"] = _samples(rows, kl)
        return found

    def _batches(self, model: Any, rows: Sequence[Row]) -> Any:
        """(indices, log-probabilities at each row's targets, [targets, vocabulary]) of batches of rows of like length."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index].tokens))
        while order:
            longest = len(rows[order[-1]].tokens)
            indices = [order.pop() for _ in range(min(len(order), max(1, self._batch_tokens // longest)))]
            tokens = torch.zeros(len(indices), longest, dtype=torch.long)
            for position, index in enumerate(indices):  # padding comes last: causal attention never sees it
                tokens[position, : len(rows[index].tokens)] = torch.tensor(rows[index].tokens)
            logits = model(tokens.to(self._device)).logits
            log_probs = []
            for position, index in enumerate(indices):
                end = len(rows[index].tokens) - 1
                log_probs.append(logits[position, end - rows[index].num_targets : end].float().log_softmax(-1))
            yield indices, log_probs

    @torch.inference_mode()
    def _log_probs(self, model: Any, rows: Sequence[Row]) -> dict[int, Tensor]:
        return {
            index: row_log_probs.cpu()
            for indices, log_probs in self._batches(model, rows)
            for index, row_log_probs in zip(indices, log_probs, strict=True)
        }

    @torch.inference_mode()
    def _own_answers(self) -> list[Row]:
        prompts = [
            self._chat([{"role": "user", "content": row["prompt"]}], add_generation_prompt=True)
            for row in self._read("prompts.jsonl")
        ]
        width, end = max(map(len, prompts)), self._end
        tokens = torch.tensor([[end] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        answers = self._model.generate(
            tokens.to(self._device),
            attention_mask=mask.to(self._device),
            do_sample=False,
            max_new_tokens=MAX_NEW_TOKENS,
            pad_token_id=end,
        )[:, width:].tolist()
        answers = [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]
        return [Row([*prompt, *answer], len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]

    def _questions(self, name: str) -> list[Row]:
        rows = []
        for row in self._read(name):
            prompt = self._chat([{"role": "user", "content": row["question"]}], add_generation_prompt=True)
            answer = [*self._tokenizer.encode(row["answer"], add_special_tokens=False), self._end]
            rows.append(Row([*prompt, *answer], len(answer)))
        return rows

    def _story(self, text: str) -> Row:
        tokens = [*self._tokenizer.encode(text), self._end]
        return Row(tokens, len(tokens) - 1)

    def _ending(self, row: dict[str, Any]) -> Row:
        context = self._tokenizer.encode(f"{row['activity_label']}: {row['ctx']}")
        ending = self._tokenizer.encode(" " + row["endings"][int(row["label"])], add_special_tokens=False)
        return Row([*context, *ending], len(ending))

    def _chat(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _read(self, name: str) -> list[dict[str, Any]]:
        with (self._data / name).open(encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def _load(self, folder: Path) -> Any:
        model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(self._device).eval()


def _samples(rows: Sequence[Row], values: Sequence[float]) -> list[Sample]:
    mean_targets = sum(row.num_targets for row in rows) / len(rows)
    return [
        {
            "doc_id": index,
            "doc_hash": hashlib.sha256(json.dumps(row.tokens).encode()).hexdigest()[:16],
            "score": value / mean_targets,
            "nats": value,
            "tokens": row.num_targets,
        }
        for index, (row, value) in enumerate(zip(rows, values, strict=True))
    ]


def write(folder: Path, model: Path, base: str | None, samples: dict[str, list[Sample]], scorer: Scorer) -> None:
    tasks = {
        name: TaskResult(
            role=TASKS[name][0],
            metric="kl" if name.endswith("_kl") else "loss",
            definition=f"{TASKS[name][1]}, nats a token",
            score=sum(sample["score"] for sample in lines) / len(lines),
            n=len(lines),
            samples=f"{SUITE}.{name}.jsonl",
            is_higher_better=False,
            unit=NATS,
        )
        for name, lines in samples.items()
    }
    settings: dict[str, str | int | float | bool | None] = {"dtype": "fp32", "max_new_tokens": MAX_NEW_TOKENS}
    result = SuiteResult(
        SUITE, str(model), hash_weights(ModelFolder("", model)), base is None, base, settings, scorer.versions, tasks
    )
    write_result(folder, result, samples)


def score_sweep(sweep: Path, scorer: Scorer) -> int:
    """Scores the cells that have a model and no scores. Returns how many."""
    base = sweep / BASE
    if not (base / f"{SUITE}.json").exists():
        write(base, scorer.base, None, scorer.score_base(), scorer)
    number = 0
    for cell in sorted(path.parent for path in sweep.glob(f"*/{CELL}")):
        model = chosen_model(cell)
        target = cell / EVALUATION / f"{SUITE}.json"
        is_finished = read_cell(cell)["status"] in (FINISHED, EVALUATED)
        if not is_finished or model is None or target.exists() or not any(model.glob("*.safetensors")):
            continue
        start = time.perf_counter()
        relative = os.path.relpath(base / f"{SUITE}.json", target.parent)
        write(target.parent, model, relative, scorer.score(model), scorer)
        number += 1
        print(f"{cell.name}: scored in {time.perf_counter() - start:.1f} s", flush=True)
    return number


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep", type=Path, nargs="+", help="out folder of a sweep")
    parser.add_argument("--base", type=Path, required=True, help="the pretrained model's folder")
    parser.add_argument("--data", type=Path, required=True, help="folder of data.py")
    parser.add_argument("--batch-tokens", type=int, default=4096)
    arguments = parser.parse_args()
    found = Scorer(arguments.base, arguments.data, batch_tokens=arguments.batch_tokens)
    for folder in arguments.sweep:
        score_sweep(folder, found)
