"""The pretrained model's own answers to a probe's prompts: generated once, kept in RUN/ with its distributions at their tokens."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from finch.data.order import EMPTY
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger
from finch.objectives import IGNORE_INDEX
from finch.probes.evaluation import REFERENCES, EvalSettings
from finch.probes.generation import greedy_answers
from finch.probes.rows import ProbeRows, Sample, num_targets
from finch.probes.settings import ProbeSettings
from finch.training.chunked_loss import TokenLoss
from finch.training.dataset_loss import iter_outputs
from finch.training.reference_file import ReferenceFile, fingerprint_of


class OwnAnswers:
    """The answers of one probe of kind self.

    Args:
        name: of the probe.
        run: the run's folder.
        rows: the prompts; they become prompts with answers.
        tokenizer: torchtune's.
        dtype: in which the model computes.
    """

    def __init__(
        self, name: str, run: Path, rows: ProbeRows, settings: ProbeSettings, tokenizer: Any, dtype: torch.dtype
    ) -> None:
        self._name, self._rows, self._settings = name, rows, settings
        self._path = run / f"own_answers_{name}.safetensors"
        self._prompts = [sample["tokens"] for sample in rows.samples]
        self._stop_tokens = list(getattr(tokenizer, "stop_tokens", None) or [tokenizer.eos_id])
        self._dtype = dtype
        self._file: ReferenceFile | None = None

    def load(self, weight_files: Iterable[Path], model_settings: dict[str, Any], parallel: Parallel) -> bool:
        """Takes the answers of an earlier start of this run; a collective. Returns whether every rank could read them.

        Args:
            weight_files: of the pretrained model.
            model_settings: what else decides its outputs, as JSON.
        """
        settings = {**model_settings, "max_new_tokens": self._settings.max_new_tokens, "top_k": self._settings.top_k}
        prompts = json.dumps([self._prompts, self._stop_tokens]).encode()
        digest = int.from_bytes(hashlib.blake2b(prompts, digest_size=8).digest(), "little")
        self._file = ReferenceFile(self._path, fingerprint_of(weight_files, digest, settings))
        tensors = self._file.load(parallel)
        if tensors is None:
            return False
        self._rows.samples = self._samples(tensors)
        logger.info(f"probes.{self._name}: the pretrained model's answers are read from {self._path}")
        return True

    def generate(self, model: TokenLoss, settings: EvalSettings) -> None:
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
            batch_size=settings.batch_size,
            dtype=self._dtype,
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
        assert self._file is not None, "load() comes first"
        if parallel.is_rank_zero:
            self._file.save(self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The answers and the distributions at their tokens, one after the other."""
        samples = self._rows.samples
        answers = [sample["tokens"][len(prompt) :] for prompt, sample in zip(self._prompts, samples, strict=True)]
        return {
            "answers": torch.tensor([token for answer in answers for token in answer], dtype=torch.int32),
            "lengths": torch.tensor([num_targets(sample) for sample in samples]),
            **{key: torch.cat([sample[key] for sample in samples]) for key in REFERENCES},
        }

    def _samples(self, tensors: dict[str, torch.Tensor]) -> list[Sample]:
        """What :meth:`_tensors` holds."""
        lengths = tensors["lengths"].tolist()
        parts = {name: tensors[name].split(lengths) for name in ("answers", *REFERENCES)}
        return [
            {**_sample(prompt, parts["answers"][index].tolist()), **{key: parts[key][index] for key in REFERENCES}}
            for index, prompt in enumerate(self._prompts)
        ]


def _sample(prompt: Sequence[int], answer: Sequence[int]) -> Sample:
    return {"tokens": [*prompt, *answer], "labels": [IGNORE_INDEX] * len(prompt) + [*answer]}


def _add_references(model: TokenLoss, name: str, samples: list[Sample], top_k: int, settings: EvalSettings) -> None:
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


def _vocabulary_size(model: TokenLoss) -> int:
    return int(model.decoder.tok_embeddings.num_embeddings)
