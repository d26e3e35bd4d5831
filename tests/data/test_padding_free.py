"""A micro-batch without padding."""

from __future__ import annotations

import pytest
import torch

from finch.data import padding_free
from finch.data.padding_free import is_right_padded, remove_padding

SAMPLES = [[5, 6, 7, 8, 9], [5, 6, 7, 1], [5, 6, 2, 3, 4, 1]]
TARGETS = [[2, 3], [2], [0, 1, 4]]  # columns of the tokens that predict one


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_free, "MIN_PREFIX", 1)
    monkeypatch.setattr(padding_free, "MULTIPLE", 1)


def padded(samples: list[list[int]], columns: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    seq = max(map(len, samples)) + 1
    tokens = torch.zeros(len(samples), seq, dtype=torch.int64)
    for row, sample in zip(tokens, samples, strict=True):
        row[: len(sample)] = torch.tensor(sample)
    return tokens, torch.tensor(
        [row * seq + column for row, each in enumerate(columns) for column in each], dtype=torch.int64
    )


def test_prefix_is_once_and_each_sample_ends_at_its_last_target() -> None:
    tokens, targets = padded(SAMPLES, TARGETS)
    layout = remove_padding(tokens, targets)
    assert tokens.flatten()[layout.indices].tolist() == [5, 6, 7, 8, 7, 2, 3, 4]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 2, 2, 3, 4]]
    assert (layout.prefix, layout.lengths) == (2, (2, 1, 3))
    # The third sample's first two targets are in the prefix.
    assert layout.targets.tolist() == [2, 3, 4, 0, 1, 7]


def test_each_target_keeps_its_token_and_position() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 12, (4,), generator=generator).tolist()
        samples = [torch.randint(1, 3, (length,), generator=generator).tolist() for length in lengths]
        columns = [[column for column in range(length) if column % 3 != 1] for length in lengths]
        tokens, targets = padded(samples, columns)
        layout = remove_padding(tokens, targets)
        assert torch.equal(tokens.flatten()[layout.indices][layout.targets], tokens.flatten()[targets])
        assert torch.equal(layout.positions[0][layout.targets], targets % tokens.shape[1])
        assert len(layout.indices) == layout.prefix + sum(layout.lengths)


def test_samples_without_targets_are_left_out() -> None:
    tokens, targets = padded(SAMPLES, [[], [3], []])
    layout = remove_padding(tokens, targets)
    assert tokens.flatten()[layout.indices].tolist() == SAMPLES[1]
    assert (layout.prefix, layout.targets.tolist()) == (0, [3])


def test_batch_without_targets_keeps_a_token() -> None:
    tokens, targets = padded(SAMPLES, [[], [], []])
    layout = remove_padding(tokens, targets)
    assert (len(layout.indices), layout.lengths, layout.targets.numel()) == (1, (1,), 0)


def test_row_is_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_free, "MULTIPLE", 5)
    tokens, targets = padded(SAMPLES, TARGETS)
    layout = remove_padding(tokens, targets)
    assert (layout.num_tokens, len(layout.indices), layout.positions.shape) == (8, 10, (1, 10))
    assert not layout.positions[0, 8:].any()
    assert layout.varlen.sizes.tolist() == [5, 3, 5, 2, 18]
    assert layout.varlen.tokens[:5].tolist() == [0, 2, 4, 5, 8]


def test_equal_samples_are_all_prefix() -> None:
    tokens, targets = padded([[1, 2, 3]] * 2, [[1, 2]] * 2)
    layout = remove_padding(tokens, targets)
    assert (layout.prefix, layout.lengths, layout.targets.tolist()) == (3, (), [1, 2, 1, 2])


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [([[1, 2, 0], [3, 0, 0]], True), ([[0, 1, 2], [0, 0, 3]], False), ([[1, 2, 3]], False), ([[1], [3]], False)],
)
def test_is_right_padded(tokens: list[list[int]], expected: bool) -> None:
    assert is_right_padded(torch.tensor(tokens), [[1, 2], [3]]) == expected


def test_short_prefix_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_free, "MIN_PREFIX", 3)
    assert remove_padding(*padded(SAMPLES, TARGETS)).lengths == (4, 3, 5)
