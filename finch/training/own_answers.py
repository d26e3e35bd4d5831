"""The pretrained model's own answers to prompts: generated once, kept in a file with its distributions at their tokens."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from finch.base.errors import UserError
from finch.base.log import logger
from finch.base.progress import Progress
from finch.data.loader import REFERENCES, EvalSettings
from finch.data.prompts import Prompts, Sample, num_targets
from finch.distributed import fsdp, watchdog
from finch.distributed.parallel import Parallel
from finch.objectives import IGNORE_INDEX
from finch.objectives.replay import chooser, end_turn, uniform_draws
from finch.training.chunked_loss import TokenLoss
from finch.training.kv_cache import KVCache
from finch.training.padding_free_attention import CALLS_ATTENTION
from finch.training.readouts import chosen, top_tokens
from finch.training.reference import ReferenceFile, compute_reference_top_k, fingerprint_of

BATCH_ROWS, BATCH_TOKENS = 64, 16384
"""At most so many prompts, and so many tokens with padding and answers, are continued at a time, whatever the number of ranks: a row's
logits, rounding included, then depend on its prompts only."""
KEPT_SHARE = 0.75
"""Share of a batch's rows: once no more have not ended, the others leave it."""


@dataclass
class OwnAnswers:
    """The answers to ``prompts`` under the config key ``key``.

    Attributes:
        path: of the file; a run's own.
        stop_tokens: end an answer.
        temperature: of the tokens' distribution, from which they are sampled, seeded by row; 0: the likeliest token.
        cache: a folder that keeps the answers for other runs as well; None: only ``path`` does.
        samples: prompts with answers and ``REFERENCES``, once :meth:`load` or :meth:`generate` has them.
    """

    key: str
    path: Path
    prompts: Prompts
    stop_tokens: Collection[int]
    max_new_tokens: int
    top_k: int
    temperature: float = 0.0
    cache: Path | None = None
    samples: list[Sample] = field(default_factory=list)
    _files: list[ReferenceFile] = field(default_factory=list)

    def load(self, weight_files: Iterable[Path], model_settings: dict[str, Any], parallel: Parallel) -> bool:
        """Takes the answers of an earlier start; a collective. Returns whether every rank could read them.

        They belong to the pretrained ``weight_files`` and to ``model_settings``, what else decides the model's outputs, as JSON.
        """
        settings = {**model_settings, "max_new_tokens": self.max_new_tokens, "top_k": self.top_k}
        if self.temperature:
            settings["temperature"] = self.temperature
        content: list[Any] = [self.prompts.tokens, sorted(self.stop_tokens)]
        content += [] if self.prompts.after is None else [self.prompts.after]
        digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).digest()
        fingerprint = fingerprint_of(weight_files, int.from_bytes(digest, "little"), settings)
        paths = [self.path]
        if self.cache is not None:
            paths.append(self.cache / f"own_answers_{fingerprint[:16]}.safetensors")
        self._files = [ReferenceFile(path, fingerprint) for path in paths]
        for file in self._files:
            tensors = file.load(parallel)
            if tensors is not None:
                self.samples = self._samples(tensors)
                logger.info(f"{self.key}: the pretrained model's answers are read from {file.path}")
                self._save(parallel)
                return True
        return False

    def generate(
        self, model: TokenLoss, parallel: Parallel, dtype: torch.dtype, measured: EvalSettings | None = None
    ) -> None:
        """Generates the answers with the pretrained weights and saves them; a collective.

        Args:
            measured: how a KL divergence from the answers' distributions is measured; they are then from such a pass, and it is exactly 0 for
                the pretrained model. None: they are from the decoding, which takes no pass, and they differ from those by rounding.

        Raises:
            UserError: all answers are empty.
        """
        start, prompts = time.perf_counter(), self.prompts.tokens
        options: dict[str, Any] = {"max_new_tokens": self.max_new_tokens, "dtype": dtype, "parallel": parallel}
        if self.prompts.after is not None:  # the model writes the user's turn as well
            # What ends a user's turn in the template need not be one of the tokens that end an answer.
            ends = {*self.stop_tokens, *self.prompts.after[:1]}
            draws = uniform_draws(len(prompts), self.max_new_tokens, 1)
            # At temperature 0 all turns would be the same: each starts from the same tokens.
            turns = generate(
                model, prompts, draws, self.temperature or 1.0, ends, title=f"{self.key}: prompts", **options
            )
            pairs = zip(prompts, turns, strict=True)
            prompts = [end_turn([*prompt, *turn["tokens"]], ends, self.prompts.after) for prompt, turn in pairs]
        draws = uniform_draws(len(prompts), self.max_new_tokens, 0)
        ends = set(self.stop_tokens)
        options.update(top_k=0 if measured else self.top_k, title=f"{self.key}: answers")
        answers = generate(model, prompts, draws, self.temperature, ends, **options)
        if all(set(answer["tokens"]) <= ends for answer in answers):
            raise UserError(f"{self.key}: the pretrained model answers none of the prompts; give other ones")
        self.samples = [_sample(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
        if measured is not None:
            found = compute_reference_top_k(model, measured.loader(self.key, self.samples), self.top_k)
            for index, sample in enumerate(self.samples):
                sample.update(zip(REFERENCES, found.row(index), strict=True))
        number = sum(map(num_targets, self.samples))
        logger.info(
            f"{self.key}: the pretrained model's {'sampled' if self.temperature else 'greedy'} answers to {len(prompts)} prompts, "
            f"{number:,} tokens, in {time.perf_counter() - start:.1f} s"
        )
        self._save(parallel)

    def _save(self, parallel: Parallel) -> None:
        """Writes each file that is not there yet; on one rank."""
        assert self._files, "load() comes first"
        for file in self._files if parallel.is_rank_zero else ():
            if not file.exists:
                file.save(self._tensors())

    def _tensors(self) -> dict[str, torch.Tensor]:
        """The answers and the distributions at their tokens, one after the other; and the prompts that are the model's own."""
        lengths = [num_targets(sample) for sample in self.samples]
        rows = [(sample["tokens"], -length) for sample, length in zip(self.samples, lengths, strict=True)]
        tensors = {
            "answers": _flat(tokens[start:] for tokens, start in rows),
            "lengths": torch.tensor(lengths),
            **{key: torch.cat([sample[key] for sample in self.samples]) for key in REFERENCES},
        }
        if self.prompts.after is not None:
            tensors["prompts"] = _flat(tokens[:start] for tokens, start in rows)
            tensors["prompt_lengths"] = torch.tensor([len(tokens) + start for tokens, start in rows])
        return tensors

    def _samples(self, tensors: dict[str, torch.Tensor]) -> list[Sample]:
        """The samples that :meth:`_tensors` holds."""
        lengths = tensors["lengths"].tolist()
        parts = {name: tensors[name].split(lengths) for name in ("answers", *REFERENCES)}
        prompts = self.prompts.tokens
        if self.prompts.after is not None:
            prompts = [each.tolist() for each in tensors["prompts"].split(tensors["prompt_lengths"].tolist())]
        return [
            _sample(prompt, {"tokens": answer.tolist(), **dict(zip(REFERENCES, references, strict=True))})
            for prompt, answer, *references in zip(prompts, *parts.values(), strict=True)
        ]


def _flat(rows: Iterable[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([token for row in rows for token in row], dtype=torch.int32)


def _sample(prompt: Sequence[int], answer: dict[str, Any]) -> Sample:
    tokens = answer["tokens"]
    return {**answer, "tokens": [*prompt, *tokens], "labels": [IGNORE_INDEX] * len(prompt) + tokens}


@torch.no_grad()
def generate(
    model: TokenLoss,
    prompts: Sequence[Sequence[int]],
    draws: torch.Tensor,
    temperature: float,
    stop_tokens: Collection[int],
    *,
    max_new_tokens: int,
    dtype: torch.dtype,
    parallel: Parallel,
    top_k: int = 0,
    title: str = "",
) -> list[dict[str, Any]]:
    """Continues prompts token by token in evaluation mode; a collective. Every rank gets all continuations.

    Each has ``tokens``, and with ``top_k`` the ``REFERENCES``: the distribution that each token is from, at temperature 1. Each of
    ``stop_tokens`` ends one, of which it is the last token. ``draws``, [prompts, max_new_tokens] in [0, 1), choose the tokens: the first
    whose cumulative probability at ``temperature`` is above the draw; at temperature 0 the likeliest. ``dtype``: of the model's
    computation. ``title``: of the progress bar; empty: no bar. FSDP2 gathers the weights once for all tokens, where every rank has room.
    """
    longest_first = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))  # little padding
    size = max(1, min(BATCH_ROWS, BATCH_TOKENS // (len(prompts[longest_first[0]]) + max_new_tokens)))
    groups = [longest_first[start : start + size] for start in range(0, len(prompts), size)]
    groups += [[]] * (-len(groups) % parallel.data_parallel_size)  # every rank runs the same number of forwards
    mine = groups[parallel.data_parallel_rank :: parallel.data_parallel_size]
    was_training = model.training
    model.eval()
    found: dict[int, list[tuple[Any, ...]]] = {index: [] for group in mine for index in group}
    progress = Progress(len(mine) * max_new_tokens, is_shown=bool(title) and parallel.is_rank_zero, leave=False)
    progress.set_title(title)
    with fsdp.gathered(model, parallel, dtype):
        for number, group in enumerate(mine, start=1):
            # An empty group runs the shortest prompt along, for the forwards' collectives; what it answers is dropped.
            batch, active = _Batch(group or longest_first[-1:], prompts, max_new_tokens, parallel.device), set(group)
            with batch.cache(model, parallel):
                for step in range(max_new_tokens):
                    # Together: the forwards of a rank that goes on would wait for one that has stopped.
                    if parallel.all_true(not active):
                        break
                    choose = chooser(draws[batch.indices, step].to(parallel.device), temperature)
                    for index, token, *reference in zip(
                        batch.indices, *batch.next_tokens(model, choose, top_k), strict=True
                    ):
                        if index in active:
                            found[index].append((token, *reference))
                            active -= {index} if token in stop_tokens else set()
                    batch.drop_ended(active)
                    progress.advance(1)
                    watchdog.heartbeat()
            if progress.is_line_due():
                progress.log(f"{title}: batch {number} of {len(mine)}, {progress.time_left()} left")
    progress.close()
    model.train(was_training)
    share = {index: _columns(steps) for index, steps in found.items()}
    merged = {index: answer for part in parallel.gather(share) for index, answer in part.items()}
    return [merged[index] for index in range(len(prompts))]


def _columns(steps: list[tuple[Any, ...]]) -> dict[str, Any]:
    tokens, *references = zip(*steps, strict=True)
    return {"tokens": list(tokens), **dict(zip(REFERENCES, map(torch.stack, references), strict=False))}


class _Batch:
    """Prompts with their answers so far, padded on the left, where keys and values are kept; else each token is a pass over all of them."""

    def __init__(
        self, indices: Sequence[int], every: Sequence[Sequence[int]], max_new_tokens: int, device: torch.device
    ) -> None:
        self.indices, prompts = list(indices), [every[index] for index in indices]
        longest = max(map(len, prompts))
        self._padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
        rows = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._tokens = torch.tensor(rows, device=device)  # [batch, longest + answers so far]
        self._longest = longest + max_new_tokens
        self._caches: list[KVCache] = []
        self._num_cached = 0

    @contextlib.contextmanager
    def cache(self, model: TokenLoss, parallel: Parallel) -> Iterator[None]:
        """Keeps keys and values inside, where the model's attention can do so."""
        # A cache takes a mask of all keys; Gemma 2's windows do not.
        layers: list[Any] = [layer.attn for layer in model.decoder.layers]
        is_plain = all(type(layer).forward in CALLS_ATTENTION for layer in layers)
        if not is_plain or parallel.tensor_mesh is not None:
            yield
            return
        self._caches = [KVCache(self._longest) for _ in layers]
        with torch.compiler.set_stance("force_eager"):  # a compiled model would be compiled again
            try:
                for layer, cache in zip(layers, self._caches, strict=True):
                    layer.kv_cache, layer.cache_enabled = cache, True
                yield
            finally:
                for layer in layers:
                    layer.kv_cache, layer.cache_enabled = None, False

    def drop_ended(self, active: Collection[int]) -> None:
        """Keeps the ``active`` rows, once they are few: copying the cache takes time too."""
        # Without an active row the batch stays as it is: other ranks may still need its forwards.
        if not 0 < len(active) <= KEPT_SHARE * len(self.indices):
            return
        kept = [row for row, index in enumerate(self.indices) if index in active]
        self.indices = [self.indices[row] for row in kept]
        self._tokens, self._padding = self._tokens[kept], self._padding[kept]
        for cache in self._caches:
            cache.keep(kept)

    def next_tokens(
        self, model: nn.Module, choose: Callable[[torch.Tensor], torch.Tensor], top_k: int
    ) -> list[Sequence[Any]]:
        """The next token of each row, which is appended, and with ``top_k`` its distribution."""
        number, seq = self._tokens.shape
        new = torch.arange(self._num_cached, seq, device=self._tokens.device)  # positions that are computed
        keys = torch.arange(self._longest if self._caches else seq, device=new.device)
        is_text = keys[None, None] >= self._padding[:, None, None]
        is_self = keys[None, None] == new[None, :, None]  # a padded query would have nothing to attend to
        mask = ((keys[None, None] <= new[None, :, None]) & is_text) | is_self  # [batch, new, keys]
        # Padding comes before position 0, where rotary embeddings have no entry; no prompt's token attends to it.
        inputs: dict[str, Any] = {"mask": mask, "input_pos": (new[None] - self._padding[:, None]).clamp(min=0)}
        labels = torch.full((number, len(new)), IGNORE_INDEX, device=new.device)
        labels[:, -1] = 0  # whose loss is not used
        # The last place of each row only: a prompt's other tokens need no logits.
        targets = torch.arange(1, number + 1, device=new.device) * len(new) - 1
        batch = {"tokens": self._tokens[:, new], "labels": labels, "targets": targets, **inputs}
        output = model(batch, [chosen(choose), top_tokens(top_k)] if top_k else [chosen(choose)])
        self._tokens = torch.cat([self._tokens, output["chosen"][:, -1:].to(self._tokens.dtype)], 1)
        if self._caches:
            self._num_cached = seq
        last = self._tokens[:, -1].tolist()
        if not top_k:
            return [last]
        return [last, output["top_log_probs"][:, -1].cpu(), output["top_tokens"][:, -1].int().cpu()]
