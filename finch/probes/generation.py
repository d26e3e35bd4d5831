"""Greedy generation with the model in training, on any number of ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn
from torchtune.modules import MultiHeadAttention, local_kv_cache

from finch.data.order import EMPTY, GlobalOrder
from finch.distributed import watchdog
from finch.distributed.parallel import Parallel
from finch.models.qwen3.attention import Qwen3Attention
from finch.objectives import IGNORE_INDEX
from finch.training.chunked_loss import TokenLoss


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

    Args:
        stop_tokens: each ends an answer, of which it is the last token.
        batch_size: prompts a forward pass and rank.
        dtype: in which the model computes.
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
    """FSDP2 gives a module it wraps a class of its own."""
    return type(module).__name__.startswith("FSDP") and isinstance(module, known)
