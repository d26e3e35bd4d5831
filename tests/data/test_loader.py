"""Micro-batches: shifted labels, empty rows, packed rows, broken rows."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torchtune.data import padded_collate_packed, padded_collate_sft

from finch.base.errors import UserError
from finch.data.dataset import load_dataset
from finch.data.loader import collator, load_batches, to_device
from finch.data.order import GlobalOrder
from finch.data.stats import DatasetStats, collect_stats


def batches(samples, tokenizer, order, rank=0):
    return list(load_batches(samples, [*order.micro_batches(rank)], collator(samples, tokenizer, padded_collate_sft)))


def test_labels_are_shifted_to_the_predicting_token(config, tokenizer):
    samples = load_dataset(config, "dataset", tokenizer)
    batch = batches(samples, tokenizer, GlobalOrder(41, micro_batch=3, shuffle=False))[0]
    for index in range(3):
        tokens, labels = samples[index]["tokens"], samples[index]["labels"]
        assert batch["tokens"][index, : len(tokens)].tolist() == tokens
        assert batch["labels"][index, : len(labels) - 1].tolist() == list(labels[1:])
        assert (batch["labels"][index, len(labels) - 1 :] == -100).all()


@pytest.mark.parametrize("packed", [False, True])
def test_rank_without_samples_gets_a_masked_row(config, tokenizer, packed):
    config.dataset.packed = packed
    samples = load_dataset(config, "dataset", tokenizer)
    assert samples.packed == packed
    order = GlobalOrder(1, micro_batch=1, ranks=2)
    (held,), (empty,) = (batches(samples, tokenizer, order, rank) for rank in range(2))
    assert held.keys() == empty.keys()
    assert empty["tokens"].shape[0] == 1
    assert (held["labels"] != -100).any()
    assert (empty["labels"] == -100).all()
    assert (torch.as_tensor(samples[0]["labels"]) != -100).any()  # the sample itself is unharmed


def test_packed_batches_equal_torchtunes_but_for_shift(config, tokenizer):
    config.dataset.packed = True
    samples = load_dataset(config, "dataset", tokenizer)
    (batch,) = batches(samples, tokenizer, GlobalOrder(2, micro_batch=2, shuffle=False))
    reference = padded_collate_packed([samples[0], samples[1]])
    assert set(batch) == {*reference, "targets"}
    assert torch.equal(batch["labels"].flatten()[batch["targets"]], batch["labels"][batch["labels"] != -100])
    assert torch.equal(batch["mask"], reference["mask"])
    assert torch.equal(batch["labels"][:, :-1], reference["labels"][:, 1:])


def test_stats_equal_the_batches_on_any_number_of_ranks(config, tokenizer):
    samples = load_dataset(config, "dataset", tokenizer)
    complete = batches(samples, tokenizer, GlobalOrder(41, micro_batch=4))
    expected = sum(int((batch["labels"] != -100).sum()) for batch in complete)
    alone = collect_stats(samples, 0, 1)
    assert (alone.num_targets, alone.without_targets.number, alone.truncated.number) == (expected, 0, 0)
    assert alone.max_length == max(len(samples[index]["tokens"]) for index in range(41))
    for ranks in (2, 3):
        assert sum((collect_stats(samples, rank, ranks) for rank in range(ranks)), DatasetStats()) == alone
    reaching = sum(len(samples[index]["tokens"]) >= alone.max_length for index in range(41))
    assert collect_stats(samples, 0, 1, max_seq_len=alone.max_length).truncated.number == reaching > 0


def test_digest_depends_on_rows_and_their_order(config, tokenizer):
    digests = set()
    for changes in ({"split": "train[1:6]"}, {"split": "train[:4]"}, {"split": "train[:5]"}, {"train_on_input": True}):
        config.dataset.update(changes)  # the last one changes only labels
        samples = load_dataset(config, "dataset", tokenizer)
        digests.add(collect_stats(samples, 0, 1).digest)
    samples.data = [samples.data[index] for index in (1, 0, 2, 3, 4)]
    digests.add(collect_stats(samples, 0, 1).digest)
    assert len(digests) == 5


def test_bad_row_is_named_by_its_number(load):
    samples = load(*[{"question": "a", "answer": "x"}] * 2)

    class Broken:
        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise KeyError("messages")

    samples.data = Broken()
    with pytest.raises(UserError, match=r"dataset: row 2 of .*rows\.jsonl cannot be used \(KeyError: 'messages'\)"):
        samples[1]


def test_batches_move_to_a_device_without_waiting(config, tokenizer):
    """The layout of a padding-free batch as well: else the host would wait for the step before."""
    copies = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function._opname == "_to_copy":
                copies.append(kwargs.get("non_blocking", False))
            return function(*args, **(kwargs or {}))

    (batch, *_) = batches(load_dataset(config, "dataset", tokenizer), tokenizer, GlobalOrder(41, micro_batch=4))
    with Copies():
        moved = to_device(batch, torch.device("meta"))
    assert moved["layout"].indices.device.type == "meta"
    assert copies == [True] * 7  # tokens, labels, targets; indices, positions, targets and keys of the layout
