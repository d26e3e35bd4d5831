"""Rows as TorchTitan's sequences: their order, their targets, and what a resumed run continues with."""

import datetime
import re
from types import SimpleNamespace

import pytest
import torch
from helpers.tokenizers import write_tokenizer

from finch.base.errors import UserError
from finch.distributed.parallel import Parallel

SEQ_LEN = 128


@pytest.fixture(scope="module")
def build(titan_configs, shared_data):
    """A dataloader over TOFU's first rows."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    from finch.integrations.titan.dataloader import RowsDataLoader

    tokenizer = HuggingFaceTokenizer(tokenizer_path=str(shared_data / "stories260k"))
    rows = str(shared_data / "tofu/full.jsonl")

    def build_loader(rank=0, ranks=1, batch=4, seq_len=SEQ_LEN, **changes):
        config = RowsDataLoader.Config(**{"data_files": rows, "split": "train[:21]", "is_packed": False, **changes})
        options = {"tokenizer": tokenizer, "seq_len": seq_len, "local_batch_size": batch}
        return config.build(dp_world_size=ranks, dp_rank=rank, **options)

    return build_loader


@pytest.fixture(scope="module")
def rows(build, shared_data):
    """finch's own samples of the same rows."""
    from finch.data.rows import rows_dataset
    from finch.models import auto_tokenizer

    tokenizer = auto_tokenizer(str(shared_data / "stories260k"), max_seq_len=SEQ_LEN)
    return rows_dataset(tokenizer, data_files=str(shared_data / "tofu/full.jsonl"), split="train[:21]")


def take(loader, number):
    batches = iter(loader)
    return [next(batches) for _ in range(number)]


def tokens_of(batches):
    return [tokens.tolist() for inputs, _ in batches for tokens in inputs["input"]]


def test_epoch_has_each_row_once_on_any_number_of_ranks(build, rows):
    order = torch.randperm(21, generator=torch.Generator().manual_seed(0)).tolist()
    batches = take(build(), 6)
    one = tokens_of(batches)
    for place, index in enumerate(order):
        expected = rows[index]["tokens"]
        assert one[place][: len(expected)] == expected
    assert [int((labels != -100).any(1).sum()) for _, labels in batches] == [4, 4, 4, 4, 4, 1]
    halves = [tokens_of(take(build(rank, 2, 2), 6)) for rank in (0, 1)]
    for step in range(5):
        both = [row for half in halves for row in half[2 * step : 2 * step + 2]]
        assert sorted(both) == sorted(one[4 * step : 4 * step + 4])


def test_targets_are_shifted_and_padding_has_none(build, rows):
    inputs, labels = take(build(is_shuffled=False), 1)[0]
    for place in range(4):
        expected, length = rows[place]["labels"], len(rows[place]["labels"])
        assert labels[place, : length - 1].tolist() == expected[1:]
        assert (labels[place, length - 1 :] == -100).all()
        assert inputs["positions"][place, :length].tolist() == list(range(length))
        assert (inputs["positions"][place, length : length + 1] == 0).all()  # another document for the attention mask


def test_packed_rows_restart_and_predict_nothing_at_their_end(build, rows):
    loader = build(is_packed=True, batch=1, is_shuffled=False)
    targets = 0
    for inputs, labels in take(loader, loader.rounds_per_epoch):
        starts = (inputs["positions"][0, 1:] == 0).nonzero().flatten()
        assert (labels[0, starts] == -100).all()
        targets += int((labels != -100).sum())
    assert targets == sum(sum(label != -100 for label in rows[index]["labels"][1:]) for index in range(21))


def test_state_continues_with_the_next_batch(build):
    straight = tokens_of(take(build(), 9))
    loader = build()
    batches = iter(loader)
    before = [next(batches) for _ in range(7)]  # in the second epoch
    resumed = build()
    resumed.load_state_dict(loader.state_dict())
    assert tokens_of(before) + tokens_of(take(resumed, 2)) == straight


@pytest.mark.parametrize("workers", [0, 1])
def test_state_continues_on_another_number_of_ranks(build, workers):
    straight, loader, one = tokens_of(take(build(), 9)), build(num_workers=workers), Parallel(torch.device("cpu"))
    loader.read_rows(one)
    batches = iter(loader)
    for _ in range(7):  # into the second epoch
        next(batches)
    found = []
    for rank in range(2):
        resumed = build(rank, 2, 1, num_workers=workers)
        resumed.read_rows(one, accumulation=2)
        resumed.load_state_dict(loader.state_dict())
        found.append(tokens_of(take(resumed, 4)))
    for step in range(2):
        rows = [row for half in found for row in half[2 * step : 2 * step + 2]]
        assert sorted(rows) == sorted(straight[28 + 4 * step :][:4])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "dataloader.seed: the checkpoint has 0, and this run 1, whose steps would have other rows"),
        ({"is_shuffled": False}, "dataloader.is_shuffled: the checkpoint has True"),
        ({"batch": 2}, "training.global_batch_size: the checkpoint has 4, and this run 2"),
        ({"ranks": 2}, "training.global_batch_size: the checkpoint has 4, and this run 8"),
        ({"split": "train[21:42]"}, "rows: the checkpoint has 21 "),
    ],
)
def test_state_of_another_order_is_refused(build, changes, message):
    loader, other = build(), build(**changes)
    take(loader, 2)
    for each in (loader, other):
        each.read_rows(Parallel(torch.device("cpu")))
    with pytest.raises(UserError, match=re.escape(message)):
        other.load_state_dict(loader.state_dict())


def test_state_of_an_earlier_version_continues(build):
    from torchtitan.components.dataloader import ParallelAwareDataloader

    loader = build()
    batches = iter(loader)
    next(batches)
    state = ParallelAwareDataloader.state_dict(loader)
    resumed = build()
    resumed.load_state_dict(state)
    assert tokens_of(take(resumed, 1)) == tokens_of([next(batches)])


@pytest.mark.parametrize("is_packed", [False, True])
def test_truncated_rows_are_reported(build, caplog, is_packed):
    build(is_packed=is_packed, seq_len=64, batch=1).read_rows(Parallel(torch.device("cpu")))
    assert "of 21 rows reach training.seq_len=64 and are truncated there (rows 1, 2, 3, ...); raise it" in caplog.text
    with pytest.raises(UserError, match=r"^dataloader: no row has a target token within training.seq_len"):
        build(is_packed=is_packed, seq_len=8, batch=1).read_rows(Parallel(torch.device("cpu")))


def test_rows_keep_the_date_of_the_first_start(titan_configs, shared_data, tmp_path, monkeypatch):
    """A chat template may write today's."""
    from torchtitan.components.tokenizer import HuggingFaceTokenizer
    from torchtitan.trainer import Trainer

    from finch.integrations.titan import FinchTrainer
    from finch.integrations.titan.dataloader import RowsDataLoader

    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    special = ["<|im_start|>", "<|im_end|>"]
    write_tokenizer(tmp_path, ["01 2 Jan Feb"], bos=None, eos="<|im_end|>", special=special, template=template)
    monkeypatch.setattr(Trainer, "init_distributed", lambda self: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda found: None)
    found = []
    for day in ("2026-01-31", "2026-02-01"):
        monkeypatch.setattr(
            "finch.integrations.titan.dataloader.datetime",
            SimpleNamespace(date=SimpleNamespace(today=lambda day=day: datetime.date.fromisoformat(day))),
        )
        rows = [RowsDataLoader.Config(data_files=f"{shared_data}/tofu/full.jsonl", split="train[:8]") for _ in range(2)]
        trainer = FinchTrainer.__new__(FinchTrainer)
        trainer.config = SimpleNamespace(
            dataloader=rows[0],
            validator=SimpleNamespace(dataloader=rows[1]),
            hf_assets_path=str(tmp_path),
            dump_folder=str(tmp_path / "run"),
        )
        trainer.init_distributed()
        options = {"tokenizer": HuggingFaceTokenizer(tokenizer_path=str(tmp_path)), "seq_len": SEQ_LEN}
        loaders = [each.build(dp_world_size=1, dp_rank=0, local_batch_size=1, **options) for each in rows]
        assert [loader.chat_tokenizer.date for loader in loaders] == ["2026-01-31"] * 2
        found.append(tokens_of(take(loaders[0], 2)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 22}, "training.local_batch_size=22 on 1 ranks is larger than the dataset of 21 samples"),
        ({"num_workers": 2}, "dataloader.num_workers=2 would repeat the rows"),
        ({"format": "preference"}, "format"),
    ],
)
def test_loader_refuses(build, changes, message):
    with pytest.raises(UserError, match=message):
        build(**changes)
