"""lm-eval's Hugging Face model with what an evaluation of hours needs: answers on disk, batches that fit, progress, and no score from NaN.

Which requests share a batch depends only on the requests and the limits, so that a continued evaluation forms the same batches, runs those
that are missing, and ends with the same bits. Each batch is given to lm-eval as one, which pads, runs and scores it.

lm-eval's own cache (CachingLM) stores every answer in SQLite and commits each of them twice: with it, a model of the tests takes four
times as long, and 40,000 requests a minute more. It knows neither the model nor the batch, so that it would give one model's answers to another.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from finch.base.errors import UserError
from finch.base.files import read_bytes, replace_text
from finch.base.log import logger
from finch.distributed.parallel import Parallel
from finch.evaluation.loading import hash_values
from finch.evaluation.progress import EvaluationProgress
from finch.models.chat_environment import in_time

_TOKENS_PER_REQUEST = 5
"""Generated tokens that take about as long as a log-likelihood; measured on a CPU, estimated for a GPU."""
_DEFAULT_MAX_TOKENS = 256
"""Of an answer, lm-eval's."""
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")

AUTO = "auto"
MAX_ROWS = 64
"""Rows of a batch whose size is ``auto``; lm-eval's limit."""
CPU_TOKENS, GPU_TOKENS = 4096, 32768
"""Tokens of such a batch of log-likelihoods, padding included; a CPU is not faster with more."""
CPU_BYTES, GPU_SHARE = 2**30, 1 / 8
"""What such a batch's logits, or the keys and values of generated tokens, may take; of a GPU its share of the memory."""

Answer = tuple[float, bool]
TokenRequest = tuple[tuple[str, str], list[int], list[int]]
Content = Sequence[Any] | Mapping[int, Any]
"""What the answers to requests depend on, by their indices."""


class AnswerCache:
    """An append-only file: a line with its key, then a line for each batch.

    Args:
        path: created if it does not exist; replaced if it has another key.
        key: of what changes an answer: weights, settings, the task's definition.

    Attributes:
        num_read: batches that the file held.
    """

    def __init__(self, path: Path, key: str) -> None:
        self._batches = _read_answers(path, key)
        self.num_read = len(self._batches)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"key": key}, *({"batch": name, "answers": answers} for name, answers in self._batches.items())]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))  # without a line that was cut off
        self._file = path.open("a", encoding="utf-8")

    def get(self, name: str) -> list[Any] | None:
        return self._batches.get(name)

    def put(self, name: str, answers: list[Any]) -> None:
        """Keeps a batch's answers. They are safe from the end of this process as soon as this returns."""
        self._batches[name] = answers
        self._file.write(json.dumps({"batch": name, "answers": answers}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _read_answers(path: Path, key: str) -> dict[str, list[Any]]:
    batches: dict[str, list[Any]] = {}
    with contextlib.suppress(OSError, ValueError, KeyError):  # no file, or a line that was cut off
        first, *lines = read_bytes(path).decode().splitlines()
        if json.loads(first) == {"key": key}:
            for line in map(json.loads, lines):
                batches[line["batch"]] = line["answers"]
    return batches


@dataclass(frozen=True)
class Row:
    """Requests that one row of a batch answers.

    Attributes:
        indices: of the requests. Of log-likelihoods they have all tokens but the last in common.
        length: tokens that the model reads, or reads and generates.
        scored: tokens at the end whose logits are needed.
    """

    indices: list[int]
    length: int
    scored: int = 1


@dataclass(frozen=True)
class Limits:
    """Of a batch. None: no limit.

    Attributes:
        rows: how many.
        tokens: how many, padding included.
        bytes: of what ``size`` gives of a batch.
    """

    rows: int
    tokens: int | None = None
    bytes: int | None = None
    size: Callable[[Sequence[Row]], int] = len

    def allow(self, batch: Sequence[Row]) -> bool:
        """``batch``: the longest row first."""
        has_room = self.tokens is None or len(batch) * batch[0].length <= self.tokens
        return len(batch) <= self.rows and has_room and (self.bytes is None or self.size(batch) <= self.bytes)


def group_rows(requests: Sequence[tuple[list[int], list[int]]], max_length: int) -> list[Row]:
    """Rows for log-likelihoods, the longest first.

    Args:
        requests: tokens of the context and of the continuation.
        max_length: tokens of the model's context; longer requests lose their beginning.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        groups.setdefault((*context, *continuation[:-1]), []).append(index)
    return [
        Row(indices, min(len(tokens), max_length), max(len(requests[index][1]) for index in indices))
        for tokens, indices in sorted(groups.items(), key=lambda group: (-len(group[0]), group[0]))
    ]


def logits_to_keep(rows: Sequence[Row]) -> int:
    """How many positions at the end of the batch, padded on the right, hold all scored tokens."""
    longest = max(row.length for row in rows)
    return max(longest - row.length + row.scored for row in rows)


def form_batches(rows: Sequence[Row], limits: Limits) -> Iterator[list[Row]]:
    """Splits rows, the longest first, into batches as large as the limits allow; one row always forms a batch."""
    batch: list[Row] = []
    for row in rows:
        if batch and not limits.allow([*batch, row]):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def count_requests(requests: Iterable[Any]) -> int:
    """How many requests lm-eval's ``Instance`` objects count as."""
    number = 0
    for request in requests:
        number += 1
        if request.request_type == "generate_until":
            number += request.args[1].get("max_gen_toks", _DEFAULT_MAX_TOKENS) // _TOKENS_PER_REQUEST
    return number


class LanguageModel(HFLM):
    """
    Args:
        model: on its device.
        tokenizer: of the pretrained model.
        name: of the model in error messages.
        batch_size: rows, or ``auto``: as many as limits of tokens and memory allow.
        ranks: the processes that share the documents.
        progress: is given the number of requests.

    Attributes:
        answer_cache: of the next task's answers.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        name: str,
        batch_size: int | str,
        ranks: Parallel,
        progress: EvaluationProgress,
    ) -> None:
        # Lengths, sampling and penalties are the task's, not the folder's: generate() takes from here what a call leaves open.
        special = {name: getattr(model.generation_config, name) for name in _SPECIAL_TOKENS}
        self._answer_prefix, self._ends_of_text, closing = _around_answer(tokenizer)
        ends = special["eos_token_id"]
        ends = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id, *closing]
        # Base and tuned stop alike.
        special["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
        model.generation_config = GenerationConfig(**special)
        super().__init__(pretrained=model, tokenizer=tokenizer, batch_size=1, softmax_dtype="float32")
        self._name, self._row_limit, self._ranks, self._progress = name, batch_size, ranks, progress
        self._rank, self._world_size = ranks.rank, ranks.world_size
        self._requests: Sequence[Instance] = []
        self._batch: Sequence[Instance] = []
        self.answer_cache: AnswerCache | None = None
        self._logits_to_keep = 0
        self._can_keep_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._sizes = model.config.get_text_config()

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """With the spaces that the template puts before an answer: lm-eval gives them to an answer that it scores."""
        render = super().apply_chat_template
        try:
            text: str = in_time(lambda turns: render(turns, add_generation_prompt), chat_history)
        except TimeoutError as error:
            raise UserError(f"{self._name}: {error}") from error
        return text + self._answer_prefix

    # Between processes, in place of accelerate's.

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self._ranks.gather_all_ranks(tensor.item()))

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        values = self._ranks.gather_all_ranks(obj)
        return values if self.rank == dst else None

    def barrier(self) -> None:
        self._ranks.gather_all_ranks(None)

    # Log-likelihoods

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """
        Raises:
            UserError: a log-likelihood is not finite, or an answer does not fit into the model's context.
        """
        self._requests = requests
        self._progress.expect(count_requests(requests))
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """
        Raises:
            UserError: always; perplexity is no score per document.
        """
        raise UserError(
            f"task {requests[0].task_name} measures perplexity, which has no score per document; leave it out"
        )

    def _loglikelihood_tokens(
        self, requests: list[TokenRequest], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        self._check_lengths(requests)
        content = [request[1:] for request in requests]
        rows = group_rows(content, self.max_length)
        limits = self._limits(self._logits_bytes, GPU_TOKENS, CPU_TOKENS)
        answers = dict(self._answered(rows, limits, content, partial(self._score, requests=requests)))
        return [(value, is_greedy) for value, is_greedy in map(answers.__getitem__, range(len(requests)))]

    def _score(self, rows: list[Row], requests: Sequence[TokenRequest]) -> list[Answer]:
        """The answers to the rows' requests, from one batch."""
        indices = [index for row in rows for index in row.indices]
        self._logits_to_keep = logits_to_keep(rows)
        self.batch_size_per_gpu = len(rows)
        answers = super()._loglikelihood_tokens([requests[index] for index in indices], disable_tqdm=True)
        for index, (value, _) in zip(indices, answers, strict=True):
            if not math.isfinite(value):
                self._refuse(self._requests[index], f"the log-likelihood of an answer is {value}")
        return answers

    def _model_call(
        self, inps: torch.Tensor, attn_mask: torch.Tensor | None = None, labels: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [batch, seq or less, vocab]: only of the last positions where the model can do that; lm-eval reads from the end."""
        options = {"logits_to_keep": self._logits_to_keep} if self._can_keep_logits else {}
        with torch.inference_mode():
            return self.model(inps, use_cache=False, **options).logits

    def _logits_bytes(self, rows: Sequence[Row]) -> int:
        """Of logits and their log-softmax in fp32."""
        positions = logits_to_keep(rows) if self._can_keep_logits else rows[0].length
        return len(rows) * positions * self._sizes.vocab_size * 8

    def _check_lengths(self, requests: Sequence[TokenRequest]) -> None:
        num_truncated = 0
        for index, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                reason = f"an answer has {len(continuation)} tokens, the model's context {self.max_length}"
                self._refuse(self._requests[index], reason)
            num_truncated += len(context) + len(continuation) > self.max_length + 1
        self._warn_of_truncated(num_truncated, len(requests))

    # Generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts; a model with a short context generates at most half of it.

        Raises:
            UserError: the logits after a prompt are not finite.
        """
        self._requests = requests
        self._progress.expect(count_requests(requests))
        answers: dict[int, str] = {}
        prompts = [request.args[0].removesuffix(self._answer_prefix) for request in requests]
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(index)
        for indices in groups.values():
            settings = dict(normalize_gen_kwargs(dict(requests[indices[0]].args[1]), self.max_gen_toks))
            settings["until"] = [*settings["until"], *self._ends_of_text]
            room = min(settings["max_gen_toks"], self.max_length // 2)
            if room < settings["max_gen_toks"] and self._ranks.is_rank_zero:
                logger.warning(
                    f"{self._name}: answers to {requests[0].task_name} end after {room} tokens in place of {settings['max_gen_toks']}: the model's context has {self.max_length}"
                )
            settings["max_gen_toks"] = room
            lengths = {index: len(self.tok_encode(prompts[index])) for index in indices}
            max_prompt = self.max_length - room
            self._warn_of_truncated(sum(length > max_prompt for length in lengths.values()), len(indices))
            rows = [Row([index], min(lengths[index], max_prompt) + room) for index in indices]
            rows.sort(key=lambda row: (-row.length, prompts[row.indices[0]]))
            limited = {index: replace(requests[index], arguments=(prompts[index], settings)) for index in indices}
            content = {index: request.args for index, request in limited.items()}
            run = partial(self._generate, requests=limited)
            answers |= self._answered(rows, self._limits(self._kept_bytes), content, run)
        return [answers[index] for index in range(len(requests))]

    def _generate(self, rows: list[Row], requests: Mapping[int, Instance]) -> list[str]:
        self._batch = [requests[row.indices[0]] for row in rows]
        self.batch_size_per_gpu = len(rows)
        return super().generate_until(self._batch, disable_tqdm=True)

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any) -> torch.Tensor:
        options = {"logits_to_keep": 1} if self._can_keep_logits else {}
        with torch.inference_mode():
            logits = self.model(context, attention_mask=settings["attention_mask"], use_cache=False, **options).logits
            for request, row in zip(self._batch, logits[:, -1], strict=True):
                if not bool(torch.isfinite(row).all()):
                    self._refuse(request, "the logits after the prompt are not finite")
            return super()._model_generate(context, max_length, stop, **settings)

    def _kept_bytes(self, rows: Sequence[Row]) -> int:
        """Of keys and values."""
        heads = getattr(self._sizes, "num_key_value_heads", None) or self._sizes.num_attention_heads
        dim = getattr(self._sizes, "head_dim", None) or self._sizes.hidden_size // self._sizes.num_attention_heads
        bytes_per_token = 2 * self._sizes.num_hidden_layers * heads * dim * self.model.dtype.itemsize
        return len(rows) * rows[0].length * bytes_per_token

    # Both

    def _limits(
        self, size: Callable[[Sequence[Row]], int], gpu_tokens: int | None = None, cpu_tokens: int | None = None
    ) -> Limits:
        if self._row_limit != AUTO:
            return Limits(int(self._row_limit))
        if self.device.type == "cuda":
            memory = torch.cuda.get_device_properties(self.device).total_memory
            return Limits(MAX_ROWS, gpu_tokens, int(memory * GPU_SHARE), size)
        return Limits(MAX_ROWS, cpu_tokens, CPU_BYTES, size)

    def _answered(
        self, rows: Sequence[Row], limits: Limits, content: Content, run: Callable[[list[Row]], list[Any]]
    ) -> Iterator[tuple[int, Any]]:
        """Each request's index and answer, batch by batch: by ``run``, or from the cache where it has one to the batch's ``content``."""
        for batch in form_batches(rows, limits):
            indices = [index for row in batch for index in row.indices]
            name = hash_values([content[index] for index in indices])
            answers = None if self.answer_cache is None else self.answer_cache.get(name)
            is_free = answers is not None
            if answers is None:
                answers = _run_in_memory(run, batch)
                if self.answer_cache is not None:
                    self.answer_cache.put(name, answers)
            self._progress.advance(count_requests(self._requests[index] for index in indices), is_free=is_free)
            yield from zip(indices, answers, strict=True)

    def _warn_of_truncated(self, number: int, total: int) -> None:
        if number and self._ranks.is_rank_zero:
            logger.warning(
                f"{self._name}: {number} of {total} requests are longer than the model's {self.max_length} tokens and lose their beginning"
            )

    def _refuse(self, request: Instance, reason: str) -> NoReturn:
        raise UserError(
            f"{self._name}: task {request.task_name}, document {request.doc_id}: {reason}; check the weights, or evaluate with --dtype fp32"
        )


def _around_answer(tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[str], list[int]]:
    """A chat template's spaces before an answer; the texts that end one, such as ``User:`` of the next turn that a pretrained model goes on with;
    and the added token that ends an answer, which may be another than the model's own end."""
    if tokenizer.chat_template is None:
        return "", [], []
    user, answer = {"role": "user", "content": "\ue000"}, {"role": "assistant", "content": "\ue001"}

    def render(turns: list[dict[str, str]]) -> str:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=len(turns) == 1))

    try:
        prompt, whole = in_time(render, [user]), in_time(render, [user, answer, user])
    except Exception:  # Jinja's errors of all kinds: a template for other conversations may fit a task's own prompts
        return "", [], []
    before, _, after = whole.partition("\ue001")
    lead = before.removeprefix(prompt)
    header = after.partition("\ue000")[0].rpartition("\n")[2]
    added = tokenizer.added_tokens_decoder
    closing = [number for number, token in added.items() if after.lstrip().startswith(token.content)]
    ends = [added[number].content for number in closing if not added[number].special]  # which decoding keeps
    ends += [f"\n{header.strip()}"] if header.endswith(": ") else []
    return "" if lead.strip() else lead, ends, closing


def _run_in_memory(run: Callable[[list[Any]], list[Any]], batch: list[Any]) -> list[Any]:
    """The answers to a batch; from halves of it where the memory does not suffice."""
    try:
        return run(batch)
    except RuntimeError as error:
        is_out_of_memory = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
        if len(batch) == 1 or not is_out_of_memory:
            raise
    torch.cuda.empty_cache()
    half = len(batch) // 2
    return _run_in_memory(run, batch[:half]) + _run_in_memory(run, batch[half:])
