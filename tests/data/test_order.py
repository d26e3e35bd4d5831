"""The global order: the same samples in the same step on every layout, each once."""

import dataclasses
import itertools

import pytest
import torch

from finch.data.order import EMPTY, GlobalOrder, eval_micro_batches


def steps(order, epoch=0, consumed=0):
    """Per step, the samples of all ranks' micro-batches together."""
    streams = [order.micro_batches(rank, epoch, consumed) for rank in range(order.ranks)]
    while consumed < order.num_samples and consumed < order.steps_per_epoch * order.global_batch:
        count = order.micro_batches_in_step(consumed)
        yield [list(itertools.islice(stream, count)) for stream in streams]
        consumed += order.global_batch
    assert all(next(stream, None) is None for stream in streams)


def samples_of(step):
    return sorted(index for rank in step for batch in rank for index in batch if index != EMPTY)


LENGTHS = torch.randint(20, 200, (401,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["by rows", "by tokens"])
@pytest.mark.parametrize("num_samples", [1, 7, 8, 23, 24, 25, 401])
def test_order_is_the_same_on_every_layout(num_samples, lengths):
    layouts = [
        GlobalOrder(num_samples, micro, accumulation, ranks, seed=3, lengths=lengths)
        for micro, accumulation, ranks in [(8, 1, 1), (2, 4, 1), (2, 2, 2), (1, 2, 4), (2, 1, 4)]
    ]
    reference = [samples_of(step) for step in steps(layouts[0], epoch=1)]
    assert sorted(itertools.chain(*reference)) == list(range(num_samples))  # each once, the short last batch included
    assert len(reference) == layouts[0].steps_per_epoch
    for layout in layouts[1:]:
        assert [samples_of(step) for step in steps(layout, epoch=1)] == reference


@pytest.mark.parametrize(("ranks", "num_samples"), [(2, 401), (3, 10), (4, 1), (4, 13)])
def test_order_gives_every_rank_as_many_micro_batches(ranks, num_samples):
    order = GlobalOrder(num_samples, micro_batch=2, accumulation=2, ranks=ranks)
    for step in steps(order):
        counts = [len(rank) for rank in step]
        assert len(set(counts)) == 1
        held = [sum(index != EMPTY for batch in rank for index in batch) for rank in step]
        assert max(held) - min(held) <= 1
        assert all(batch == [EMPTY] or EMPTY not in batch for rank in step for batch in rank)


@pytest.mark.parametrize(("ranks", "num_samples"), [(1, 401), (2, 401), (3, 10), (4, 1), (4, 13)])
def test_order_deals_even_tokens(ranks, num_samples):
    plain = GlobalOrder(num_samples, micro_batch=3, accumulation=2, ranks=ranks, seed=1)
    dealt = dataclasses.replace(plain, lengths=LENGTHS)
    for rows, tokens in zip(steps(plain), steps(dealt), strict=True):
        assert samples_of(rows) == samples_of(tokens)
        assert {len(rank) for rank in tokens} == {len(rank) for rank in rows}
        batches = [[index for index in batch if index != EMPTY] for rank in tokens for batch in rank]
        sizes = [len(batch) for batch in batches]
        assert max(sizes) <= 3
        assert max(sizes) - min(sizes) <= 1
        if max(sizes) == min(sizes):  # no pair of micro-batches differs by more than one sample does
            lengths = LENGTHS[samples_of(tokens)]
            assert spread([int(LENGTHS[batch].sum()) for batch in batches]) <= int(lengths.max() - lengths.min())


def spread(values):
    return max(values) - min(values)


def test_order_deals_a_row_that_is_drawn_twice():
    order = GlobalOrder(8, micro_batch=2, ranks=2, indices=lambda epoch: [5, 1, 5, 2, 3, 3, 3, 0], lengths=LENGTHS)
    assert [samples_of(step) for step in steps(order)] == [[1, 2, 5, 5], [0, 3, 3, 3]]


def test_order_continues_after_consumed_samples():
    order = GlobalOrder(50, micro_batch=2, accumulation=2, ranks=2, seed=1)
    whole = list(steps(order, epoch=4))
    assert list(steps(order, epoch=4, consumed=24)) == whole[3:]
    moved = GlobalOrder(50, micro_batch=4, accumulation=2, ranks=1, seed=1)  # resumed on another number of ranks
    assert [samples_of(step) for step in steps(moved, epoch=4, consumed=24)] == [samples_of(step) for step in whole[3:]]


def test_order_shuffles_like_distributed_sampler():
    from torch.utils.data.distributed import DistributedSampler

    sampler = DistributedSampler(range(30), num_replicas=1, rank=0, seed=5)
    sampler.set_epoch(2)
    assert GlobalOrder(30, micro_batch=4, seed=5).permutation(2) == list(sampler)
    assert GlobalOrder(30, micro_batch=4, shuffle=False).permutation(2) == list(range(30))


def test_order_drop_last_drops_the_short_batch():
    order = GlobalOrder(25, micro_batch=8, drop_last=True)
    assert order.steps_per_epoch == 3
    assert [len(samples_of(step)) for step in steps(order)] == [8, 8, 8]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [1, 2, 17, 200])
def test_eval_micro_batches_read_each_row_once(num_rows, ranks):
    rows = list(range(300, 300 - num_rows, -1))
    by_rank = [eval_micro_batches(rows, LENGTHS, micro_batch=8, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert len({len(batches) for batches in by_rank}) == 1
    read = [index for batches in by_rank for batch in batches for index in batch if index != EMPTY]
    assert sorted(read) == sorted(rows)
    budget = 8 * float(LENGTHS[rows].float().mean())
    for forward in zip(*by_rank, strict=True):
        held = [batch for batch in forward if batch != [EMPTY]]
        assert held
        assert all(EMPTY not in batch for batch in held)
        assert max(map(len, held)) - min(map(len, held)) <= 1
        for batch in held:  # padded to the longest, a batch stays in the budget
            assert len(batch) == 1 or len(batch) * int(LENGTHS[batch].max()) <= budget
    longest = [int(LENGTHS[batches[0]].max()) for batches in by_rank if batches[0] != [EMPTY]]
    assert max(longest) == int(LENGTHS[rows].max())


def test_eval_micro_batches_keep_the_order_of_unknown_lengths():
    assert eval_micro_batches(range(7), None, micro_batch=2, rank=0, ranks=2) == [[0, 2], [4, 6]]
    assert eval_micro_batches(range(7), None, micro_batch=2, rank=1, ranks=2) == [[1, 3], [5]]
    assert eval_micro_batches([5], None, micro_batch=2, rank=1, ranks=2) == [[EMPTY]]
