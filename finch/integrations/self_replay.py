"""Self-replay for any training loop: a pretrained model's own answers, and the KL divergence that holds a model to them. Needs only torch.

    answers = own_answers(model, prompts, stop_tokens=[tokenizer.eos_token_id])          # before training
    loss = loss + 0.3 * replay_kl(model, step_rows(answers, step, number=4, seed=0))     # in each step

finch's recipe has ``self_replay``, transformers' Trainer and TRL's SFTTrainer :class:`finch.integrations.transformers.SelfReplay`; the answers to
equal prompts are the same in all three.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from finch.base.errors import UserError
from finch.base.files import atomic_file
from finch.integrations.step_loss import has_ranks
from finch.objectives.regularization import coarse_token_kl, top_log_probs
from finch.objectives.replay import chooser, uniform_draws
from finch.objectives.replay import step_rows as step_rows

BATCH_ROWS = 32
"""Prompts that are continued at a time."""
_MEASURED_ROWS = 8
"""Answers in a batch whose logits are kept: few, since a vocabulary is large."""
_running: list[nn.Module] = []
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Answer:
    """A prompt with the pretrained model's answer.

    Attributes:
        tokens: [prompt + answer] int64.
        log_probs, top: [answer, top_k + 1] fp32 and [answer, top_k] int64, the pretrained model's distributions at the answer's tokens, see
            :func:`finch.objectives.regularization.top_log_probs`.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    top: torch.Tensor


def own_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    stop_tokens: Collection[int],
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 512,
    stream: int = 0,
) -> list[Answer]:
    """The answers of a transformers model to tokenized prompts, each sampled with its own seed.

    Args:
        stop_tokens: each ends an answer, and is its last token.
        temperature: of the sampling; 0: the likeliest token.
        top_k: tokens of a distribution that are kept, at most the vocabulary; the rest count as one.
        stream: 0, or 1 for another set of seeds.
    """
    answers: list[Answer] = []
    found = answer_tokens(
        model, prompts, stop_tokens=stop_tokens, max_new_tokens=max_new_tokens, temperature=temperature, stream=stream
    )
    with evaluating(model), _replaying(model):
        for prompt, answer in zip(prompts, found, strict=True):
            tokens = torch.tensor([*prompt, *answer])
            logits = model(input_ids=tokens[None].to(next(model.parameters()).device)).logits[0]
            # After what a prompt-tuned model puts before its input.
            answers.append(_answer(tokens, logits[-len(tokens) :][len(prompt) - 1 : -1], top_k))
    return answers


def answer_tokens(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    stop_tokens: Collection[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    stream: int = 0,
) -> list[list[int]]:
    """The tokens of the answers alone; arguments as for :func:`own_answers`. Raises UserError if the model has no ``generate``, or a prompt no token."""
    if not hasattr(model, "generate"):
        raise UserError(
            f"model={type(model).__name__}: it has no generate, so that it cannot answer prompts; take a causal LM"
        )
    if not all(map(len, prompts)):
        raise UserError(
            "prompts: one has no token, so that its first answer token has no distribution; begin it with BOS or EOS"
        )
    draws = uniform_draws(len(prompts), max_new_tokens, stream).to(next(model.parameters()).device)
    found: list[list[int]] = []
    with evaluating(model), _replaying(model):
        for start in range(0, len(prompts), BATCH_ROWS):
            rows = [list(prompt) for prompt in prompts[start : start + BATCH_ROWS]]
            found += _continue(model, rows, draws[start : start + BATCH_ROWS], temperature, stop_tokens)
    return found


def _answer(tokens: torch.Tensor, logits: torch.Tensor, top_k: int) -> Answer:
    log_probs, top = top_log_probs(logits, min(top_k, logits.shape[-1]))
    return Answer(tokens, log_probs.cpu(), top.cpu())


def replay_kl(model: Any, answers: Sequence[Answer]) -> torch.Tensor:
    """KL(pretrained || model), [] in nats with its graph: the mean over the answers' tokens. For a transformers model."""
    return replay_kl_sum(model, answers) / sum(len(answer.top) for answer in answers)


def replay_kl_sum(model: Any, answers: Sequence[Answer]) -> torch.Tensor:
    """As :func:`replay_kl`, the sum."""
    return _token_kl(model, answers).sum()


def measured_answers(
    model: Any, prompts: Sequence[Sequence[int]], *, stop_tokens: Collection[int], max_new_tokens: int, top_k: int
) -> list[Answer]:
    """Greedy answers with the model's distributions as :func:`answer_kl` computes them, so that it is 0 until the model changes."""
    found = answer_tokens(model, prompts, stop_tokens=stop_tokens, max_new_tokens=max_new_tokens)
    rows = [(torch.tensor([*prompt, *answer]), len(answer)) for prompt, answer in zip(prompts, found, strict=True)]
    answers: list[Answer] = []
    with evaluating(model):
        for batch in _batches(rows):
            logits = _logits(model, batch)
            answers += [_answer(tokens, each, top_k) for (tokens, _), each in zip(batch, logits, strict=True)]
    return answers


def answer_kl(model: Any, answers: Sequence[Answer]) -> torch.Tensor:
    """[answers] KL(pretrained || model) in evaluation mode, each the sum over an answer's tokens, in nats."""
    sums: list[torch.Tensor] = []
    with evaluating(model):
        for batch in _batches(answers):
            kl = _token_kl(model, batch)
            sums += [each.sum() for each in kl.split([len(answer.top) for answer in batch])]
    return torch.stack(sums)


def _batches(rows: Sequence[_Row]) -> Iterator[Sequence[_Row]]:
    return (rows[start : start + _MEASURED_ROWS] for start in range(0, len(rows), _MEASURED_ROWS))


def _token_kl(model: Any, answers: Sequence[Answer]) -> torch.Tensor:
    """[tokens of all answers]"""
    logits = torch.cat(_logits(model, [(answer.tokens, len(answer.top)) for answer in answers]))
    log_probs, top = (
        torch.cat([getattr(answer, name) for answer in answers]).to(logits.device) for name in ("log_probs", "top")
    )
    return coarse_token_kl(logits, log_probs, top)


def _logits(model: Any, rows: Sequence[tuple[torch.Tensor, int]]) -> list[torch.Tensor]:
    """[answer, vocabulary] of each: the logits that its last tokens, so many, are predicted from, of one padded batch."""
    device = next(model.parameters()).device
    tokens = pad_sequence([each for each, _ in rows], batch_first=True)
    mask = torch.arange(tokens.shape[1]) < torch.tensor([[len(each)] for each, _ in rows])
    with _replaying(model):
        logits = model(input_ids=tokens.to(device), attention_mask=mask.long().to(device)).logits
    logits = logits[:, -tokens.shape[1] :]  # after what a prompt-tuned model puts before its input
    return [row[len(each) - number - 1 : len(each) - 1] for row, (each, number) in zip(logits, rows, strict=True)]


def save_answers(answers: Sequence[Answer], file: Path, digest: str = "") -> None:
    """All of them one after another, in one safetensors file. ``digest``: of the prompts' texts."""
    from safetensors.torch import save

    parts = {name: torch.cat([getattr(answer, name) for answer in answers]) for name in ("tokens", "log_probs", "top")}
    lengths = torch.tensor([[len(answer.tokens), len(answer.top)] for answer in answers])
    with atomic_file(file) as partial:
        partial.write_bytes(
            save({**parts, "lengths": lengths}, {"prompts": digest})
        )  # save_file leaves another file there when it is killed


def read_answers(file: Path) -> list[Answer]:
    """What :func:`save_answers` has written."""
    from safetensors.torch import load_file

    parts = load_file(file)
    tokens, answers = parts.pop("lengths").T.tolist()
    rows = zip(
        parts["tokens"].split(tokens), parts["log_probs"].split(answers), parts["top"].split(answers), strict=True
    )
    return [Answer(*row) for row in rows]


def digest_of(file: Path) -> str:
    """Of the prompts' texts."""
    from safetensors import safe_open

    with safe_open(file, "pt") as answers:
        return (answers.metadata() or {}).get("prompts", "")


def has_module(model: nn.Module, kind: type) -> bool:
    return any(isinstance(module, kind) for module in model.modules())


def is_replaying(model: nn.Module) -> bool:
    """Whether this forward pass is one of self-replay's: not the task's loss."""
    return any(each is model for each in _running)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards each module has its own mode again, where a user has frozen one in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(modes[0][1])  # some modules do more in it than to note the mode
        for module, was_training in modes:
            module.training = was_training


@contextmanager
def _replaying(model: nn.Module) -> Iterator[None]:
    _running.append(model)
    try:
        yield
    finally:
        _running.remove(model)


@contextmanager
def _plain_generation(model: nn.Module) -> Iterator[None]:
    """Without generation_config.json, from which ``generate`` takes what a call leaves open: Qwen2.5's has a penalty, others force a token."""
    from transformers import GenerationConfig

    # PEFT's wrapper hands its own on to the model inside.
    own: list[tuple[Any, Any]] = [
        (each, each.generation_config) for each in model.modules() if "generation_config" in vars(each)
    ]
    try:
        for module, _ in own:
            module.generation_config = GenerationConfig()
        yield
    finally:
        for module, settings in own:
            module.generation_config = settings


def _continue(
    model: Any, prompts: list[list[int]], draws: torch.Tensor, temperature: float, stop_tokens: Collection[int]
) -> list[list[int]]:
    """By the model's own ``generate``, which keeps keys and values; a processor of its scores chooses the token."""
    from transformers import GenerationConfig, LogitsProcessorList

    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    tokens = torch.tensor(padded, device=draws.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=draws.device)

    def choose(found: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = chooser(draws[:, found.shape[1] - longest], temperature)(scores)
        return torch.full_like(scores, -torch.inf).scatter_(1, chosen[:, None], 0.0)

    settings = GenerationConfig(
        max_new_tokens=draws.shape[1],
        do_sample=False,
        eos_token_id=list(stop_tokens) or None,
        pad_token_id=0,
    )
    is_sharded = has_ranks() and has_module(model, FSDPModule)
    options = {"logits_processor": LogitsProcessorList([choose]), "synced_gpus": is_sharded or None}
    with _plain_generation(model):
        found = model.generate(tokens, attention_mask=mask, generation_config=settings, **options)
    answers = []
    for row in found[:, longest:].tolist():
        end = next((index for index, token in enumerate(row, start=1) if token in stop_tokens), len(row))
        answers.append(row[:end])
    return answers
