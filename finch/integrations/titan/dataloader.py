"""TorchTitan's dataloader over the row formats of finch.data, in finch's global order."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.base.files import replace_text
from finch.base.log import logger
from finch.integrations.titan.mistakes import reported_under_torchrun
from finch.objectives import IGNORE_INDEX

if TYPE_CHECKING:
    from finch.distributed.parallel import Parallel

Sequence = tuple[dict[str, torch.Tensor], torch.Tensor]

ROWS_KEYS = (
    *("source", "data_files", "name", "split", "format", "column_map"),
    *("part", "validation_fraction", "split_seed"),
)
"""Of a ``RowsDataLoader.Config``, the arguments of ``rows_dataset``."""
TOKENIZER_KEYS = ("prompt_style", "thinking", "date")
"""And those of ``auto_tokenizer``."""
TOFU = "locuslab/TOFU"
"""The rows of the packaged configs."""
DATE_FILE = "first_start_date"
"""In the dump folder, where the chat template writes today's date."""
_ORDER, _STEP_SAMPLES = "finch_order", "training.global_batch_size"


class RowsDataLoader(ParallelAwareDataloader):
    """Rows of any format that :func:`finch.data.rows.rows_dataset` reads, tokenized with the chat template of the model's folder.

    Step i takes the samples (packs of rows, or rows) [i*G, (i+1)*G) of the epoch's seeded permutation, G being the global batch, on any number of ranks, as in
    finch's recipe. With gradient accumulation the last step of an epoch may continue with the next one's first samples.

    Rows longer than ``seq_len`` are truncated. Shorter ones share a sequence, or with ``is_packed=False`` are padded. Raises UserError for rows that cannot be used, or fewer than one
    micro-batch of all ranks needs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        source: str | None = None
        """A name on the hub, or ``json``, ``csv`` or ``parquet``; None: by the extension of ``data_files``."""

        data_files: str | None = None
        """Path or pattern of local files."""

        name: str | None = None
        """The hub's configuration."""

        split: str = "train"
        """The split, also in the form ``train[:400]``."""

        format: str = "auto"
        """The format of the rows; ``auto`` finds it. See docs/data.md."""

        column_map: dict[str, str] = field(default_factory=dict)
        """From the format's fields to columns of other names."""

        part: str = "all"
        """``all``, ``train`` or ``validation``: the seeded part of the rows."""

        validation_fraction: float = 0.1
        """Share of the rows in the part ``validation``."""

        split_seed: int = 0
        """Of the permutation that chooses the parts."""

        is_packed: bool = True
        """Whether rows share a sequence, with positions that restart at each, where TorchTitan's attention masks restart too."""

        prompt_style: str = "chat"
        """``authors``: the prompts of the FINCH paper's code."""

        thinking: bool = False
        """The chat template's ``enable_thinking``."""

        date: str | None = None
        """For a chat template that writes today's, as YYYY-MM-DD; None: that of the run's first start."""

        is_shuffled: bool = True
        """Whether an epoch is a seeded permutation, or the rows' own order."""

        seed: int = 0
        """Of the permutation; epoch e takes seed + e."""

        infinite: bool = True
        """Whether another epoch follows each; otherwise training ends with the first one."""

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = 1,
        **kwargs: Any,
    ) -> None:
        with reported_under_torchrun():  # here, before TorchTitan records its traceback
            dataset = RowSequences(config, tokenizer, dp_world_size, dp_rank, seq_len, local_batch_size)
        super().__init__(
            dataset,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
            num_workers=config.num_workers,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor,
            snapshot_every_n_steps=snapshot_every_n_steps or 1,
            batch_size=local_batch_size,
        )
        self._rank_id = "dp_rank_0"  # the state is the same on all ranks, and is read by any number of them
        self.rounds_per_epoch, self.chat_tokenizer = dataset.rounds_per_epoch, dataset.tokenizer
        self._samples, self._seq_len = dataset.samples, seq_len
        self._round_samples = local_batch_size * dp_world_size
        self._order: dict[str, Any] = {"dataloader.seed": config.seed, "dataloader.is_shuffled": config.is_shuffled}

    def read_rows(self, parallel: Parallel, accumulation: int = 1) -> None:
        """Reads each row once, divided over the ranks, and warns of what is unusual, such as truncated rows; a collective. The state then has
        the rows' digest and the samples of a step, by which another number of ranks continues it. Raises UserError for a row that cannot be
        used, or where none has a target."""
        from finch.data.stats import DatasetStats, collect_stats

        share = collect_stats(self._samples, parallel.data_parallel_rank, parallel.data_parallel_size, self._seq_len)
        stats = sum(parallel.gather(share), DatasetStats())
        for note in stats.notes(self._seq_len):
            logger.warning(f"dataloader: {note.replace('tokenizer.max_seq_len', 'training.seq_len')}")
        if stats.bad:
            raise UserError(stats.bad_rows("dataloader")[0])
        if stats.num_targets == 0:
            raise UserError(
                "dataloader: no row has a target token within training.seq_len; raise it, or check the template"
            )
        self._order["rows"] = f"{len(self._samples)} ({stats.digest:016x})"
        self._order[_STEP_SAMPLES] = self._round_samples * accumulation

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        # Inside TorchTitan's entry: a checkpoint without an entry that is asked for does not load.
        state[self._rank_id] = pickle.dumps({**pickle.loads(state[self._rank_id]), _ORDER: self._order})
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As TorchTitan's, and on another number of ranks. Raises UserError where its steps would have other rows."""
        saved = pickle.loads(state_dict[self._rank_id]).get(_ORDER, {}) if self._rank_id in state_dict else {}
        for key, value in saved.items():
            if self._order.get(key, value) != value:
                raise UserError(
                    f"{key}: the checkpoint has {value}, and this run {self._order[key]}, whose steps would have other rows; resume with the "
                    "checkpoint's, or start the rows anew with --checkpoint.exclude_from_loading dataloader"
                )
        if _STEP_SAMPLES in saved:
            state_dict = {**state_dict, "world_size": self.dp_world_size}
        super().load_state_dict(state_dict)


class RowSequences(IterableDataset[Sequence], Stateful):
    """A rank's sequences, epoch after epoch: ``{"input": [seq], "positions": [seq]}`` and labels, [seq], -100 where ignored.

    The state is the epoch and how many of its samples all ranks have had.

    Attributes:
        samples: finch's rows, or packs of them.
        tokenizer: finch's, of the rows.
        rounds_per_epoch: micro-batches per rank and epoch. In the last one, rows without targets take the place of what is missing.
    """

    def __init__(
        self,
        config: RowsDataLoader.Config,
        tokenizer: BaseTokenizer,
        num_ranks: int,
        rank: int,
        seq_len: int,
        micro_batch: int,
    ) -> None:
        require_extras("RowsDataLoader", "torchtune")
        if config.num_workers > 1:
            raise UserError(f"dataloader.num_workers={config.num_workers} would repeat the rows; set 0 or 1")
        from finch.data.dataset import Samples
        from finch.data.order import GlobalOrder
        from finch.data.rows import rows_dataset
        from finch.models import auto_tokenizer

        own = auto_tokenizer(
            folder_of(tokenizer), max_seq_len=seq_len, **{key: getattr(config, key) for key in TOKENIZER_KEYS}
        )
        self.tokenizer = own
        options = {key: getattr(config, key) for key in ROWS_KEYS}
        rows = rows_dataset(own, **options, packed=config.is_packed)
        self.samples = Samples(rows, "dataloader", str(config.data_files or config.source))
        self._seq_len, self._pad_id, self._is_infinite = seq_len, own.pad_id, config.infinite
        self._rank, self._micro_batch = rank, micro_batch
        self._order = GlobalOrder(len(rows), micro_batch, ranks=num_ranks, shuffle=config.is_shuffled, seed=config.seed)
        if self._order.global_batch > len(rows):
            raise UserError(
                f"training.local_batch_size={micro_batch} on {num_ranks} ranks is larger than the dataset of {len(rows)} samples; lower it"
            )
        self.rounds_per_epoch = self._order.steps_per_epoch
        self._epoch = self._consumed = 0

    def __iter__(self) -> Iterator[Sequence]:
        from finch.data.order import EMPTY

        while True:
            for batch in self._order.micro_batches(self._rank, self._epoch, self._consumed):
                # Before its rows: the state that is saved after them is read at the last one.
                self._consumed += self._order.global_batch
                for index in batch + [EMPTY] * (self._micro_batch - len(batch)):
                    yield to_sequence(self.samples[index], self._seq_len, self._pad_id)
            if not self._is_infinite:
                return
            self._epoch, self._consumed = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "consumed": self._consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._epoch = state["epoch"]
        # Earlier versions counted the rows of one rank.
        self._consumed = state.get("consumed", state.get("position", 0) * self._order.ranks)


def keep_date(config: Any) -> None:
    """Gives the loaders the date of the run's first start, where the chat template writes today's: a resumed run has the same rows; a collective."""
    loaders = [config.dataloader, getattr(config.validator, "dataloader", None)]
    loaders = [loader for loader in loaders if isinstance(loader, RowsDataLoader.Config)]
    if not loaders:
        return
    from finch.models.chat_template import read_chat_template

    if "strftime_now" not in (read_chat_template(Path(config.hf_assets_path)) or ""):
        return
    file, found = Path(config.dump_folder) / DATE_FILE, ["", ""]  # the date, or why there is none
    if torch.distributed.get_rank() == 0:
        try:
            if not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                replace_text(file, loaders[0].date or str(datetime.date.today()))
            found[0] = file.read_text()
        except OSError as error:
            found[1] = f"dump_folder={config.dump_folder} cannot be written ({error.strerror}); give another folder"
    torch.distributed.broadcast_object_list(found)
    if found[1]:
        raise UserError(found[1])
    for loader in loaders:
        loader.date = loader.date or found[0]


def to_sequence(sample: dict[str, Any], seq_len: int, pad_id: int) -> Sequence:
    """A row, or a pack of rows, as TorchTitan takes it: input and positions [seq_len], and labels [seq_len], shifted.

    ``sample`` has ``tokens`` and ``labels``, [row]; a pack's ``input_pos`` restarts at 0 with each row. What follows the row is padding, a
    separate document without targets. The end of a row predicts nothing, also where another one follows.
    """
    tokens, labels = (torch.as_tensor(sample[name], dtype=torch.long)[:seq_len] for name in ("tokens", "labels"))
    length = len(tokens)
    positions = torch.arange(length)
    if "input_pos" in sample:
        positions = torch.as_tensor(sample["input_pos"], dtype=torch.long)[:seq_len]
    targets = torch.where(positions[1:] == 0, IGNORE_INDEX, labels[1:])
    inputs = {
        "input": torch.cat([tokens, tokens.new_full((seq_len - length,), pad_id)]),
        "positions": torch.cat([positions, torch.arange(seq_len - length)]),
    }
    return inputs, torch.cat([targets, targets.new_full((seq_len - len(targets),), IGNORE_INDEX)])


def folder_of(tokenizer: BaseTokenizer) -> str:
    """The Hugging Face folder that TorchTitan has read its tokenizer from. Raises UserError if it is another kind of tokenizer."""
    folder = getattr(tokenizer, "tokenizer_path", None)
    if folder is None:
        raise UserError(
            f"tokenizer={type(tokenizer).__qualname__}: finch.data reads the tokenizer of a Hugging Face folder; set HuggingFaceTokenizer"
        )
    return str(folder)
