"""The pretrained model's own answers to a probe's prompts: generated once, kept in RUN/ with its distributions at their tokens."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from finch import files
from finch.data.order import EMPTY, GlobalOrder
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger
from finch.objectives import IGNORE_INDEX
from finch.probes.evaluation import REFERENCES, EvalSettings
from finch.probes.rows import ProbeRows, Sample, num_targets
from finch.probes.settings import ProbeSettings
from finch.training.dataset_loss import iter_outputs
from finch.training.reference_loss import fingerprint_of


class OwnAnswers:
    """The answers of one probe of kind self.

    Args:
        name: of the probe.
        run: the run's folder.
        rows: the prompts; they become prompts with answers.
        tokenizer: torchtune's.
    """

    def __init__(self, name: str, run: Path, rows: ProbeRows, settings: ProbeSettings, tokenizer: Any) -> None:
        self._name, self._rows, self._settings = name, rows, settings
        self._file = run / f"own_answers_{name}.safetensors"
        self._prompts = [sample["tokens"] for sample in rows.samples]
        self._stop_tokens = list(getattr(tokenizer, "stop_tokens", None) or [tokenizer.eos_id])
        self._pad_id = tokenizer.pad_id
        self._fingerprint = ""

    def load(self, weight_files: Iterable[Path], model_settings: dict[str, Any], parallel: Parallel) -> bool:
        """Takes the answers of an earlier start of this run; a collective. Returns whether every rank could read them.

        Args:
            weight_files: of the pretrained model.
            model_settings: what else decides its outputs, as JSON.
        """
        settings = {**model_settings, "max_new_tokens": self._settings.max_new_tokens, "top_k": self._settings.top_k}
        prompts = json.dumps([self._prompts, self._stop_tokens]).encode()
        digest = int.from_bytes(hashlib.blake2b(prompts, digest_size=8).digest(), "little")
        self._fingerprint = fingerprint_of(weight_files, digest, settings)
        samples = self._read()
        if not parallel.all_true(samples is not None) or samples is None:
            return False
        self._rows.samples = samples
        logger.info(f"probes.{self._name}: the pretrained model's answers are read from {self._file}")
        return True

    def generate(self, model: nn.Module, settings: EvalSettings) -> None:
        """Generates the answers with the pretrained weights and saves them; a collective.

        Raises:
            UserError: no answer has a token.
        """
        start, parallel = time.perf_counter(), settings.parallel
        answers = greedy_answers(
            model,
            self._prompts,
            stop_tokens=self._stop_tokens,
            max_new_tokens=self._settings.max_new_tokens,
            pad_id=self._pad_id,
            batch_size=settings.batch_size,
            parallel=parallel,
        )
        samples = [_sample(prompt, answer) for prompt, answer in zip(self._prompts, answers, strict=True)]
        number = sum(map(num_targets, samples))
        if number == 0:
            raise UserError(f"probes.{self._name}: the pretrained model answers none of the prompts; give other rows")
        _add_references(model, self._name, samples, self._settings.top_k, settings)
        self._rows.samples = samples
        logger.info(
            f"probes.{self._name}: the pretrained model's greedy answers to {len(samples)} prompts, {number:,} tokens, in "
            f"{time.perf_counter() - start:.1f} s"
        )
        if parallel.is_rank_zero:
            self._save()

    def _save(self) -> None:
        samples = self._rows.samples
        lengths = torch.tensor([num_targets(sample) for sample in samples])
        answers = [sample["tokens"][len(prompt) :] for prompt, sample in zip(self._prompts, samples, strict=True)]
        tensors = {
            "answers": torch.tensor([token for answer in answers for token in answer], dtype=torch.int32),
            "lengths": lengths,
            **{key: torch.cat([sample[key] for sample in samples]) for key in REFERENCES},
        }
        with files.atomic_file(self._file) as partial:
            save_file(tensors, partial, metadata={"fingerprint": self._fingerprint})

    def _read(self) -> list[Sample] | None:
        try:
            with safe_open(self._file, framework="pt") as content:
                if (content.metadata() or {}).get("fingerprint") != self._fingerprint:
                    return None
                tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            lengths = tensors.pop("lengths").tolist()
            parts = {name: tensor.split(lengths) for name, tensor in tensors.items()}
            return [
                {**_sample(prompt, parts["answers"][index].tolist()), **{key: parts[key][index] for key in REFERENCES}}
                for index, prompt in enumerate(self._prompts)
            ]
        except (
            Exception
        ):  # safetensors has no class of its own for a truncated file; the answers are then generated again
            return None


@torch.no_grad()
def greedy_answers(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    stop_tokens: Collection[int],
    max_new_tokens: int,
    pad_id: int,
    batch_size: int,
    parallel: Parallel,
) -> list[list[int]]:
    """The most likely next token, again and again, in evaluation mode; a collective. Every rank gets all answers.

    Nothing is kept between two tokens: each one is a forward pass over prompts and answers so far.

    Args:
        model: see :class:`finch.training.chunked_loss.TokenLoss`.
        stop_tokens: each ends an answer, of which it is the last token.
        batch_size: prompts a forward pass and rank.
    """
    order = GlobalOrder(len(prompts), batch_size, ranks=parallel.data_parallel_size, shuffle=False)
    was_training = model.training
    model.eval()
    answers: dict[int, list[int]] = {}
    for indices in order.micro_batches(parallel.data_parallel_rank):
        rows = [list(prompts[index]) if index != EMPTY else list(prompts[0]) for index in indices]
        lengths = [len(row) for row in rows]
        is_done = [index == EMPTY for index in indices]
        for _ in range(max_new_tokens):
            if parallel.all_true(all(is_done)):
                break
            for position, token in enumerate(_next_tokens(model, rows, pad_id, parallel.device)):
                if not is_done[position]:
                    rows[position].append(token)
                    is_done[position] = token in stop_tokens
            watchdog.heartbeat()
        answers |= {
            index: row[length:] for index, row, length in zip(indices, rows, lengths, strict=True) if index != EMPTY
        }
    model.train(was_training)
    shares = parallel.gather(answers)
    merged = {index: answer for share in shares for index, answer in share.items()}
    return [merged[index] for index in range(len(prompts))]


def _next_tokens(model: nn.Module, rows: Sequence[Sequence[int]], pad_id: int, device: torch.device) -> list[int]:
    longest = max(map(len, rows))
    tokens = torch.full((len(rows), longest), max(pad_id, 0))
    for index, row in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
    targets = torch.tensor([index * longest + len(row) - 1 for index, row in enumerate(rows)])
    labels = torch.full_like(tokens, IGNORE_INDEX)
    labels.view(-1)[targets] = 0  # whose loss is not used
    targets = targets.to(device)
    top = model(tokens.to(device), labels.to(device), targets, num_top_log_probs=1)["top_tokens"]
    found: list[int] = top.flatten()[targets].tolist()
    return found


def _sample(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    return {"tokens": [*prompt, *answer], "labels": [IGNORE_INDEX] * len(prompt) + [*answer]}


def _add_references(model: nn.Module, name: str, samples: list[Sample], top_k: int, settings: EvalSettings) -> None:
    """Adds the pretrained model's distributions at the answers' tokens to each sample; a collective."""
    share: dict[int, tuple[torch.Tensor, ...]] = {}
    vocabulary = _vocabulary_size(model)
    for indices, batch, output in iter_outputs(
        model, settings.loader(name, samples), num_top_log_probs=min(top_k, vocabulary)
    ):
        log_probs, tokens = output["top_log_probs"].cpu(), output["top_tokens"].cpu()
        for position, index in enumerate(indices):
            if index != EMPTY:
                is_target = batch["labels"][position] != IGNORE_INDEX
                share[index] = (log_probs[position][is_target], tokens[position][is_target].int())
    for part in settings.parallel.gather(share):
        for index, values in part.items():
            samples[index].update(zip(REFERENCES, values, strict=True))


def _vocabulary_size(model: Any) -> int:
    return int(model.decoder.tok_embeddings.num_embeddings)
