"""The pretrained model's own answers to a probe's prompts: generated once, kept in RUN/ with its distributions at their tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.modules import MultiHeadAttention, local_kv_cache

from finch.config.schema import Probe
from finch.data.order import EMPTY, GlobalOrder
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger
from finch.models.qwen3 import Qwen3Attention
from finch.objectives import IGNORE_INDEX
from finch.probes.evaluation import REFERENCES, EvalSettings
from finch.probes.rows import ProbeRows, Sample, num_targets
from finch.training.chunked_loss import TokenLoss
from finch.training.reference import ReferenceFile, fingerprint_of, iter_outputs


class SelfGeneratedProbe:
    """The answers of one probe of kind self. ``rows`` are the prompts, which become prompts with answers."""

    def __init__(
        self, name: str, run: Path, rows: ProbeRows, settings: Probe, tokenizer: Any, dtype: torch.dtype
    ) -> None:
        self._name, self._rows, self._settings = name, rows, settings
        self._path = run / f"own_answers_{name}.safetensors"
        self._prompts = [sample["tokens"] for sample in rows.samples]
        self._stop_tokens = list(getattr(tokenizer, "stop_tokens", None) or [tokenizer.eos_id])
        self._dtype = dtype
        self._file: ReferenceFile | None = None

    def load(self, weight_files: Iterable[Path], model_settings: dict[str, Any], parallel: Parallel) -> bool:
        """Takes the answers of an earlier start of this run; a collective. Returns whether every rank could read them.

        They belong to the pretrained ``weight_files`` and to ``model_settings``, what else decides the model's outputs, as JSON.
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
        """Generates the answers with the pretrained weights and saves them; a collective. Raises UserError if no answer has a token."""
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


@torch.no_grad()
def greedy_answers(
    model: TokenLoss,
    prompts: Sequence[Sequence[int]],
    *,
    stop_tokens: Collection[int],
    max_new_tokens: int,
    batch_size: int,
    dtype: torch.dtype,
    parallel: Parallel,
) -> list[list[int]]:
    """The most likely next token, again and again, in evaluation mode; a collective. Every rank gets all answers.

    Each of ``stop_tokens`` ends an answer, of which it is the last token. ``batch_size``: prompts per forward pass and rank.
    """
    longest_first = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))  # little padding
    order = GlobalOrder(
        len(prompts), batch_size, ranks=parallel.data_parallel_size, indices=lambda epoch: longest_first
    )
    was_training = model.training
    model.eval()
    answers: dict[int, list[int]] = {}
    for indices in order.micro_batches(parallel.data_parallel_rank):
        batch = _Batch([prompts[max(index, 0)] for index in indices], max_new_tokens, parallel.device)
        is_done = [index == EMPTY for index in indices]
        found: list[list[int]] = [[] for _ in indices]
        with batch.cache(model, dtype, parallel):
            for _ in range(max_new_tokens):
                if parallel.all_true(all(is_done)):
                    break
                for position, token in enumerate(batch.next_tokens(model)):
                    if not is_done[position]:
                        found[position].append(token)
                        is_done[position] = token in stop_tokens
                watchdog.heartbeat()
        answers |= {index: answer for index, answer in zip(indices, found, strict=True) if index != EMPTY}
    model.train(was_training)
    merged = {index: answer for share in parallel.gather(answers) for index, answer in share.items()}
    return [merged[index] for index in range(len(prompts))]


class _Batch:
    """Prompts with their answers so far, padded on the left, where keys and values are kept; else each token is a pass over all of them."""

    def __init__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, device: torch.device) -> None:
        longest = max(map(len, prompts))
        self._padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._tokens = torch.tensor(rows, device=device)  # [batch, longest + answers so far]
        self._longest = longest + max_new_tokens
        self._is_cached, self._num_cached = False, 0

    def cache(self, model: TokenLoss, dtype: torch.dtype, parallel: Parallel) -> contextlib.AbstractContextManager[Any]:
        """Keeps keys and values inside, where the model's attention can do so."""
        self._is_cached = _can_cache(model) and parallel.tensor_mesh is None
        if not self._is_cached:
            return contextlib.nullcontext()
        stack = contextlib.ExitStack()
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # a compiled model would be compiled again
        stack.enter_context(
            local_kv_cache(
                model.decoder,
                batch_size=len(self._tokens),
                device=parallel.device,
                dtype=dtype,
                decoder_max_seq_len=self._longest,
            )
        )
        return stack

    def next_tokens(self, model: nn.Module) -> list[int]:
        """The next token of each row, which is appended."""
        number, seq = self._tokens.shape
        new = torch.arange(self._num_cached, seq, device=self._tokens.device)  # positions that are computed
        keys = torch.arange(self._longest if self._is_cached else seq, device=new.device)
        is_text = keys[None, None] >= self._padding[:, None, None]
        is_self = keys[None, None] == new[None, :, None]  # a padded query would have nothing to attend to
        mask = ((keys[None, None] <= new[None, :, None]) & is_text) | is_self  # [batch, new, keys]
        inputs: dict[str, Any] = {"mask": mask, "input_pos": (new[None] - self._padding[:, None]).clamp(min=0)}
        labels = torch.full((number, len(new)), IGNORE_INDEX, device=new.device)
        labels[:, -1] = 0  # whose loss is not used
        targets = torch.arange(1, number + 1, device=new.device) * len(new) - 1
        output = model(self._tokens[:, new], labels, targets, num_top_log_probs=1, **inputs)
        tokens: torch.Tensor = output["top_tokens"][:, -1]  # [batch, 1]
        self._tokens = torch.cat([self._tokens, tokens.to(self._tokens.dtype)], 1)
        if self._is_cached:
            self._num_cached = seq
        return tokens.flatten().tolist()


def _can_cache(model: TokenLoss) -> bool:
    """Whether every attention layer is one whose cache takes a mask of all keys; Gemma 2's windows do not."""
    known = (MultiHeadAttention, Qwen3Attention)
    attentions = [module for name, module in model.decoder.named_modules() if name.endswith(".attn")]
    return bool(attentions) and all(type(module) in known or _is_sharded(module, known) for module in attentions)


def _is_sharded(module: nn.Module, known: tuple[type, ...]) -> bool:
    """FSDP2 gives a module it wraps a separate class."""
    return type(module).__name__.startswith("FSDP") and isinstance(module, known)
