"""Mixtures: what an epoch draws, in which order, on any number of ranks, from the seed alone."""

import itertools
import time
from collections import Counter

import pytest
from helpers.runs import write_rows
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.data.dataset import load_dataset
from finch.data.mixture import Mixture, mix
from finch.data.stats import DatasetStats, collect_stats

ROWS = (60, 25, 7)
WEIGHTS = (0.6, 0.1, 0.3)  # 60, 10 and 30 draws


def mixture(**changes):
    return Mixture.from_weights(ROWS, WEIGHTS, **{"seed": 3, **changes})


def split(indices):
    """An epoch's rows of each dataset, in the order in which they are consumed."""
    ends = list(itertools.accumulate(ROWS))
    starts = [end - rows for end, rows in zip(ends, ROWS, strict=True)]
    return [[i - start for i in indices if start <= i < end] for start, end in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_epoch_draws_exact_counts_and_repeats_a_row_only_after_all_are_drawn(shuffle):
    epochs = [split(mixture(shuffle=shuffle).indices(epoch)) for epoch in range(15)]
    assert {tuple(map(len, parts)) for parts in epochs} == {(60, 10, 30)}
    for dataset, rows in enumerate(ROWS):
        drawn = [row for parts in epochs for row in parts[dataset]]
        passes = [drawn[start : start + rows] for start in range(0, len(drawn), rows)]
        assert len(passes) > 1
        assert all(len(set(part)) == len(part) for part in passes)
        is_new_order = len({tuple(part) for part in passes if len(part) == rows}) > 1
        assert is_new_order == shuffle


def test_epochs_and_seeds_have_other_orders():
    orders = {tuple(mixture(seed=seed).indices(epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert mixture().indices(2) == mixture().indices(2)
    kinds = {tuple(index < 60 for index in mixture(seed=seed).indices(0)) for seed in range(4)}
    assert len(kinds) == 4


def test_without_shuffle_draws_are_spread_evenly():
    mixed = Mixture.from_weights((8, 100), (0.8, 0.2), shuffle=False)
    assert mixed.indices(0) == [0, 1, 8, 2, 3, 4, 5, 9, 6, 7]
    assert mixed.indices(1) == [0, 1, 10, 2, 3, 4, 5, 11, 6, 7]


def test_shuffled_draws_are_not_in_blocks():
    places = [place for place, index in enumerate(mixture().indices(0)) if index < 60]
    assert 40 < sum(places) / 60 < 60


@pytest.mark.parametrize("epochs", [1, 2, 3, 9])
def test_drawn_rows_are_those_of_the_epochs(epochs):
    drawn = Counter(itertools.chain(*(mixture().indices(epoch) for epoch in range(epochs))))
    assert mixture().unique_rows_drawn(epochs) == sorted(drawn)
    first = Counter(mixture().indices(0))
    assert mixture().draws_per_row().tolist() == [first[index] for index in range(sum(ROWS))]


def test_a_million_rows_take_well_under_a_second():
    mixed = Mixture.from_weights((1_000_000, 1_000_000), (0.95, 0.05))
    start = time.process_time()
    assert len(mixed.indices(1)) == 1_052_632
    assert time.process_time() - start < 3  # of CPU time, so that other work on the machine does not count


def test_description_names_rows_share_draws_and_repetitions():
    assert mixture().describe(["a.jsonl", "b.jsonl", "c"]) == (
        "an epoch draws 100 samples: 60 (60.00%) from the 60 rows of a.jsonl, each 1 times; 10 (10.00%) from the 25 rows of b.jsonl, "
        "each 0.4 times; 30 (30.00%) from the 7 rows of c, each 4.29 times"
    )


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1, 0.09), r"dataset\[1\]\.weight=0\.09: an epoch of 5 samples would draw none of its rows; .* 0\.2 or"),
        ((1e-9, 1), r"dataset\[0\]\.weight=1e-09: an epoch would have 5e\+09 samples.*put another entry first"),
    ],
)
def test_weights_that_draw_nothing_or_too_much_are_refused(weights, message):
    with pytest.raises(UserError, match=message):
        Mixture.from_weights((5, 50), weights)


def test_stats_read_the_drawn_rows_and_the_digest_covers_the_draws(config, tokenizer, rows_file, tmp_path):
    others = tmp_path / "others.jsonl"
    write_rows(others, 60)
    task = dict(config.dataset)

    def read(weight, epochs, ranks=1):
        datasets = [{**task, "weight": 1}, {**task, "data_files": str(others), "weight": weight}]
        cfg = OmegaConf.create({"dataset": datasets, "epochs": epochs, "shuffle": True})
        samples = load_dataset(cfg, "dataset", tokenizer)
        assert mix(cfg, samples, seed=0).rows == (41, 60)
        assert [source for _, source in samples.parts] == [str(rows_file), str(others)]
        return sum((collect_stats(samples, rank, ranks) for rank in range(ranks)), DatasetStats())

    one, three = read(0.25, 1), read(0.25, 3)
    assert read(0.25, 3, ranks=2) == three
    assert one.digest == one.first_epoch_digest == three.first_epoch_digest != three.digest
    assert one.num_targets < three.num_targets < read(0.25, 6).num_targets == read(0.25, 9).num_targets
    assert read(0.3, 1).digest != one.digest
    assert read(4, 1).digest != read(6, 1).digest  # the same rows, more often
