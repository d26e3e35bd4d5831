"""Self-replay: the pretrained model's own answers as further rows of each step, held to its distributions by a KL divergence."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune.modules import TransformerDecoder

from finch.base import files, run_files
from finch.base.errors import Unavailable, UserError
from finch.base.progress import duration
from finch.config.schema import SelfReplay as Settings
from finch.data.dataset import Samples
from finch.data.loader import REPLAY, Batch
from finch.data.prompts import (
    Prompts,
    check_context,
    context_limit,
    load_rows,
    own_prompts,
    stop_tokens,
    tokenize_prompts,
)
from finch.data.replay import Replay
from finch.data.training_data import TrainingData
from finch.distributed.parallel import Parallel
from finch.distributed.precision import precision_of
from finch.objectives import IGNORE_INDEX
from finch.training.chunked_loss import TokenLoss
from finch.training.own_answers import OwnAnswers
from finch.training.readouts import Readout, kl_from
from finch.training.reference import model_settings
from finch.weights.huggingface import PretrainedFolder


class SelfReplay:
    """strength * mean over the replayed tokens of a step of KL(pretrained || trained); does nothing without the config's block.

    The pretrained model's ``top_k`` most likely tokens at each replayed token are compared, all others count as one: a lower bound. The mean
    is over all ranks and micro-batches. Replayed rows count for no objective, and for no number of tokens but ``num_replayed``.

    Attributes:
        prompts: None without self-replay, or before :meth:`read_prompts`.
        rows: the answers, once :meth:`load_cache` or :meth:`prepare` has them.
    """

    def __init__(self, cfg: DictConfig, decoder: TransformerDecoder, parallel: Parallel) -> None:
        self.settings = Settings.of(cfg.self_replay)
        self._cfg, self._parallel, self._decoder = cfg, parallel, decoder
        self.rows: Replay | None = None
        self._answers: OwnAnswers | None = None
        self._seconds, self._seed = 0.0, 0
        self._number = self._sum = torch.zeros((), dtype=torch.float64)
        self.prompts: Prompts | None = None

    def read_prompts(self, tokenizer: Any, data: TrainingData) -> None:
        """Reads or makes the prompts. Raises UserError for prompts that cannot be used or are validation rows, packed rows, and a disk without
        room for the answers."""
        settings, key = self.settings, "self_replay"
        if settings is None:
            return
        prompts = self.prompts = read_prompts(
            settings, data.samples, getattr(self._decoder, "max_seq_len", None), tokenizer
        )
        for samples in data.validations.values():
            self.refuse_prompts(samples.key, samples)
        folder = Path(self._cfg.output_dir)
        cache = None if settings.cache is None else Path(settings.cache)
        self._check_room(cache or folder, len(prompts.tokens))
        self._seed = data.order.seed
        self._answers = OwnAnswers(
            key,
            folder / run_files.SELF_REPLAY,
            prompts,
            stop_tokens=stop_tokens(tokenizer),
            max_new_tokens=settings.max_new_tokens,
            top_k=settings.top_k,
            temperature=settings.temperature,
            cache=cache,
        )

    def refuse_prompts(self, key: str, rows: Any) -> None:
        """Calls :func:`refuse_replayed`, once there are prompts."""
        if self.settings is not None and self.prompts is not None:
            refuse_replayed(self.settings, self.prompts, key, rows)

    def load_cache(self, base: PretrainedFolder) -> None:
        """Reads the answers, if an earlier start or another run has left them; a collective."""
        if self._answers is not None and self._answers.load(base.files, model_settings(self._cfg), self._parallel):
            self._take(self._answers)

    @property
    def needs_pretrained(self) -> bool:
        """Whether the pretrained weights must be loaded, also in a run that is resumed."""
        return self._answers is not None and self.rows is None

    def prepare(self, model: TokenLoss) -> None:
        """Generates what is not there yet with the pretrained weights; a collective."""
        if self._answers is None or self.rows is not None:
            return
        start = time.perf_counter()
        self._answers.generate(model, self._parallel, precision_of(self._cfg.dtype).compute)
        self._take(self._answers)
        self._seconds = time.perf_counter() - start

    def start_step(self) -> None:
        self._sum = torch.zeros((), dtype=torch.float64, device=self._parallel.device)

    def readout(self, batch: Batch) -> Readout | None:
        """``replay_kl`` of a micro-batch; None where it has no replayed rows."""
        has_replayed = self.settings is not None and REPLAY[0] in batch
        return kl_from(batch[REPLAY[0]], batch[REPLAY[1]], "replay_kl") if has_replayed else None

    def add_to(self, total: torch.Tensor, outputs: dict[str, torch.Tensor], batch: Batch) -> torch.Tensor:
        """[] ``total``, what a micro-batch differentiates, with its share of the penalty, FSDP2's mean over ranks undone."""
        if self.settings is None:
            return total
        # It is the step's, over all ranks, in each micro-batch: this one may have no replayed row.
        self._number = batch["num_replayed"]
        if "replay_kl" not in outputs:  # the step's replayed rows are in others
            return total
        self._sum += outputs["replay_kl"].detach()
        if self.settings.strength == 0:
            return total
        scale = self.settings.strength * self._parallel.data_parallel_size / self._number
        return total + outputs["replay_kl"] * scale

    def metrics(self) -> dict[str, torch.Tensor]:
        """``replay_kl``: [] the step's mean over its replayed tokens in nats; ``num_replayed``: [] their number; a collective."""
        if self.settings is None:
            return {}
        return {"replay_kl": self._parallel.all_reduce_sum_(self._sum) / self._number, "num_replayed": self._number}

    def summary(self, steps: list[dict[str, Any]]) -> list[str]:
        """What it cost, from the steps' lines in the metrics."""
        replayed, learned = (sum(line.get(key, 0) for line in steps) for key in ("num_replayed", "num_target_tokens"))
        if self.settings is None or not steps:
            return []
        answers = "read from a file" if self._seconds == 0 else f"generated in {duration(self._seconds)}"
        share = f"{replayed:,.0f} of {replayed + learned:,.0f} trained tokens, {replayed / (replayed + learned):.0%}"
        return [f"self_replay: {share}; its answers were {answers}"]

    def _take(self, answers: OwnAnswers) -> None:
        assert self.settings is not None
        self.rows = Replay(answers.samples, self.settings.share, self._seed)

    def _check_room(self, folder: Path, rows: int) -> None:
        assert self.settings is not None
        place = files.existing_part(folder)
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise Unavailable(
                f"{folder}, for the answers of self_replay, cannot be written; give another output_dir or self_replay.cache"
            )
        # Of a token itself, log-probabilities and most likely tokens.
        needed = rows * self.settings.max_new_tokens * (4 + 4 * (self.settings.top_k + 1) + 4 * self.settings.top_k)
        free = shutil.disk_usage(place).free
        if free < needed:
            raise Unavailable(
                f"{folder} has {free:,} bytes of free disk, the answers of self_replay need up to {needed:,}; make room, or lower self_replay.rows or top_k"
            )


def read_prompts(settings: Settings, samples: Samples, max_seq_len: int | None, tokenizer: Any) -> Prompts:
    """The prompts, from their file or the model's own. Raises UserError for prompts that cannot be used, and where training ``samples`` are packed."""
    key = "self_replay"
    if samples.packed:
        raise UserError(
            f"{key} adds rows to each micro-batch, which dataset.packed=True fills: set dataset.packed=False, padding_free=True runs without padding as well"
        )
    limit = context_limit(max_seq_len, tokenizer)
    if settings.prompts == "self":
        prompts = own_prompts(tokenizer, settings.rows)
        turn = 0 if prompts.after is None else settings.max_new_tokens + len(prompts.after)
        length, remedy = len(prompts.tokens[0]) + turn, f"lower {key}.max_new_tokens"
        check_context(f"{key}: a prompt of the model's own", length, settings.max_new_tokens, limit, remedy)
        return prompts
    try:
        rows = load_rows(settings.prompts, None, None, "train", settings.rows)
    except UserError as error:
        raise error.under(f"{key}.prompts={settings.prompts}", data_files=f"{key}.prompts") from error
    options: dict[str, Any] = {"limit": limit, "max_new_tokens": settings.max_new_tokens}
    return Prompts(tokenize_prompts(key, settings.prompts, rows, tokenizer, **options))


def refuse_replayed(settings: Settings, prompts: Prompts, key: str, rows: Any) -> None:
    """Raises UserError if one of ``rows``, with tokens and labels, has a replayed prompt of a file: what it measures would be trained on."""
    replayed = set() if settings.prompts == "self" else {tuple(prompt) for prompt in prompts.tokens}
    for number in range(len(rows) if replayed else 0):
        tokens, labels = (torch.as_tensor(rows[number][name]).tolist() for name in ("tokens", "labels"))
        end = next((index for index, label in enumerate(labels) if label != IGNORE_INDEX), len(tokens))
        if tuple(tokens[:end]) in replayed:
            raise UserError(
                f"row {number + 1} of {key} has a prompt of self_replay.prompts={settings.prompts}, which is trained on; give other prompts"
            )
