"""Splits into training, validation and test rows that depend on the rows' content and a seed, not on the order of the file.

Rows are sorted by a keyed hash of their prompts, and the sorted list is cut by counts: test rows first, then validation rows, then
training rows. Everybody who has the same rows gets the same parts, in the same order.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from finch.errors import UserError

ALL = "all"
PARTS = (ALL, "train", "validation", "test")


def part_indices(
    rows: Sequence[tuple[Any, Any]], part: str, *, validation_fraction: float, test_fraction: float, seed: int
) -> list[int]:
    """The indices of one part's rows in the order of their hashes, which is the same for every order of ``rows``.

    Rows with equal prompts belong to the same part: a cut between them moves behind the last of them, so that the part before the
    cut has more rows than its fraction, and the next one fewer. Otherwise the sizes are the rounded fractions.

    Args:
        rows: of each row, its prompt and its remaining content as JSON values. Fields without a value count as absent.
        part: ``train``, ``validation`` or ``test``.
        validation_fraction: share of all rows, in [0, 1).
        test_fraction: share of all rows, in [0, 1).
        seed: of the hash; another one gives other parts.

    Raises:
        UserError: a fraction is out of range, or a part is empty.
    """
    check_fractions(part, validation_fraction, test_fraction)
    keys = [(_digest(prompt, seed), _digest(rest, seed)) for prompt, rest in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)

    def cut_after(count: int) -> int:
        while 0 < count < len(order) and keys[order[count - 1]][0] == keys[order[count]][0]:
            count += 1
        return count

    num_test, num_validation = round(test_fraction * len(rows)), round(validation_fraction * len(rows))
    test_end = cut_after(num_test)
    validation_end = max(test_end, cut_after(num_test + num_validation))
    parts = {
        "test": order[:test_end],
        "validation": order[test_end:validation_end],
        "train": order[validation_end:],
    }
    shares = {"test": test_fraction, "validation": validation_fraction, "train": 1.0}
    if empty := next((name for name, share in shares.items() if share > 0 and not parts[name]), None):
        raise UserError(
            f"dataset: of {len(rows)} rows none is left for part={empty} with validation_fraction={validation_fraction:g} and "
            f"test_fraction={test_fraction:g} (rows with equal prompts stay together); give more rows or another fraction"
        )
    return parts[part]


def check_fractions(part: str, validation_fraction: float, test_fraction: float) -> None:
    """
    Raises:
        UserError: a fraction is out of range, or that of ``part`` is 0.
    """
    fractions = {"validation": validation_fraction, "test": test_fraction}
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"dataset.{name}_fraction={fraction} must lie in [0, 1), such as 0.05")
    if validation_fraction + test_fraction >= 1:
        raise UserError(
            f"dataset.validation_fraction={validation_fraction} and dataset.test_fraction={test_fraction} leave no rows to train on; their "
            "sum must be below 1"
        )
    if fractions.get(part) == 0:
        raise UserError(f"dataset.part={part} is empty with dataset.{part}_fraction=0; set it, such as 0.05")


def _digest(value: Any, seed: int) -> bytes:
    text = json.dumps(_without_none(value), sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode("ascii"), key=str(seed).encode(), digest_size=16).digest()


def _without_none(value: Any) -> Any:
    """The datasets library gives every row the fields that any row of the file has."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return value
