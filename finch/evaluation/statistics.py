"""Statistics of scores and of their changes: paired by document, with intervals, tests, and calibration errors.

Scores, deltas and confidences are fractions. All random numbers are seeded: equal samples give equal numbers.

Documents of one cluster (such as two orders of one question) are not independent: their mean counts once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, norm

from finch.base.errors import UserError

RESAMPLES = 10_000
"""Of the bootstrap and of the sign-flip test."""
CONFIDENCE = 0.95
Z = float(norm.ppf(0.5 + CONFIDENCE / 2))
"""Half of a 95% interval of a normal distribution, in standard deviations."""
CALIBRATION_BINS, FEW_DOCUMENTS = 10, 100
MCNEMAR, SIGN_FLIP = "exact McNemar", "sign-flip permutation"

Array = NDArray[np.float64]

_CHUNK = 1 << 18  # random numbers at a time: they stay in the processor's cache
_EXACT_FLIPS = 13  # differences: all 2^13 sign flips are fewer than RESAMPLES


@dataclass(frozen=True)
class Mean:
    """A task's mean score.

    Attributes:
        mean: of the clusters' means.
        standard_error: sd / sqrt(n_clusters); NaN for a single cluster.
        low, high: 95% interval: Wilson's for independent scores of 0 and 1, else BCa bootstrap. Both equal ``mean`` where all clusters are
            equal, and are NaN for a single cluster.
        n: documents with a score.
        n_clusters: independent units among them; ``n`` where there are no clusters.
    """

    mean: float
    standard_error: float
    low: float
    high: float
    n: int
    n_clusters: int


@dataclass(frozen=True)
class Delta(Mean):
    """The change of a task's score from the base model to the tuned one: ``mean`` of tuned minus base over the documents with both scores,
    always with a bootstrap's interval; without one, and without a standard error (NaN), where all differences are equal: they do not say how far
    others might lie.

    Attributes:
        p_value: two-sided, for the hypothesis of no change.
        test: that gave it: ``exact McNemar`` for scores of 0 and 1, else ``sign-flip permutation``.
    """

    p_value: float
    test: str


def paired_delta(base: Sequence[Mapping[str, Any]], tuned: Sequence[Mapping[str, Any]]) -> Delta:
    """The change of a score, over the documents that both models have a score of.

    Args:
        base, tuned: samples of one task, see ``finch.evaluation.results.Sample``; in any order.

    Raises:
        UserError: the models were evaluated on different documents, or no document has two scores.
    """
    before, after = _by_document(base, "the base model"), _by_document(tuned, "the tuned model")
    if before.keys() != after.keys():
        raise UserError(
            f"the base and the tuned model were evaluated on different documents ({len(before.keys() - after.keys())} only by the base, "
            f"{len(after.keys() - before.keys())} only by the tuned model, {len(before.keys() & after.keys())} by both); evaluate both with the "
            "same data and the same --limit"
        )
    pairs = [(before[key], after[key]) for key in sorted(before)]
    pairs = [pair for pair in pairs if all(sample.get("score") is not None for sample in pair)]
    if not pairs:
        raise UserError("no document has a score from both the base and the tuned model; evaluate both again")
    scores = np.array([(one["score"], other["score"]) for one, other in pairs], dtype=float)
    differences = _cluster_means(scores[:, 1] - scores[:, 0], [one for one, _ in pairs])
    is_binary = bool(np.isin(scores, (0, 1)).all()) and len(differences) == len(scores)
    p_value, test = (_mcnemar(differences), MCNEMAR) if is_binary else (_sign_flip(differences), SIGN_FLIP)
    spread = _bootstrap(differences) if np.ptp(differences) > 0 else (math.nan, math.nan, math.nan)
    return Delta(float(differences.mean()), *spread, len(pairs), len(differences), p_value, test)


def mean_interval(samples: Sequence[Mapping[str, Any]], *, is_share: bool = True) -> Mean:
    """The mean of the scores that are not None.

    Args:
        is_share: scores of 0 and 1 are right and wrong answers, with Wilson's interval; False for losses and divergences.

    Raises:
        UserError: there are none.
    """
    scored = [sample for sample in samples if sample.get("score") is not None]
    if not scored:
        raise UserError("no document has a score; evaluate the model again")
    scores = np.array([sample["score"] for sample in scored], dtype=float)
    means = _cluster_means(scores, scored)
    standard_error, low, high = _bootstrap(means)
    if is_share and np.isin(scores, (0, 1)).all() and len(means) == len(scores):
        interval = binomtest(int(scores.sum()), len(scores)).proportion_ci(CONFIDENCE, method="wilson")
        low, high = float(interval.low), float(interval.high)
    return Mean(float(means.mean()), standard_error, low, high, len(scores), len(means))


def score_table(columns: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str]) -> tuple[Array, list[list[int]]]:
    """[documents, columns] the scores of several models, NaN where there is none, and the positions of each cluster's documents.

    Args:
        columns: each model's samples of one task.
        names: the models'.

    Raises:
        UserError: two were evaluated on different documents.
    """
    found = [_by_document(samples, name) for samples, name in zip(columns, names, strict=True)]
    for documents, name in zip(found, names, strict=True):
        if documents.keys() != found[0].keys():
            raise UserError(
                f"{names[0]} and {name} were evaluated on different documents; evaluate both with the same data and --limit"
            )
    keys = sorted(found[0])
    scores = np.array([[documents[key].get("score") for documents in found] for key in keys], dtype=float)
    return scores, _clusters([found[0][key] for key in keys])


def resample(scores: Array, clusters: Sequence[Sequence[int]], number: int, *, seed: int) -> tuple[Array, Array]:
    """Means over clusters, [columns], and those of ``number`` draws of clusters with replacement, [draws, columns], the same ones for all columns.

    Args:
        scores: [documents, columns], NaN where there is none.
        clusters: positions of their documents.
    """
    table = np.array([mean_of_known(scores[members], axis=0) for members in clusters])
    values, is_known, n = mean_of_known(table, axis=0), ~np.isnan(table), len(table)
    table = np.where(is_known, table, 0.0)
    draws = []
    for rows in _drawn_rows(np.random.default_rng(seed), n, number):
        counts = np.apply_along_axis(np.bincount, 1, rows, minlength=n).astype(float)
        draws.append(counts @ table / np.maximum(counts @ is_known, 1))
    return values, np.concatenate(draws)


def mean_of_known(table: Array, axis: int) -> Array:
    """Of what is not NaN; NaN: nothing is. (numpy's nanmean warns of that.)"""
    is_known = ~np.isnan(table)
    count = is_known.sum(axis)
    return np.where(count > 0, np.where(is_known, table, 0.0).sum(axis) / np.maximum(count, 1), math.nan)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment, in the order given: p values that may be compared with 0.05 whatever their number."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def half_width(p: float, n: int) -> float:
    """Of the 95% interval of a rate ``p`` measured on ``n`` independent documents, by the normal approximation."""
    return Z * math.sqrt(p * (1 - p) / n)


def confidence_bins(confidences: Sequence[float]) -> NDArray[np.int64]:
    """[answers] the bin of each confidence in [0, 1]: bin m of M, counted from 0, has those in (m/M, (m + 1)/M], the first one 0 as well."""
    # 0.7 * 10 is 7.000000000000001, and stated confidences are mostly such round numbers.
    numbers = np.ceil(np.round(np.asarray(confidences, dtype=float) * CALIBRATION_BINS, 9)).astype(np.int64) - 1
    return np.clip(numbers, 0, CALIBRATION_BINS - 1)


def expected_calibration_error(confidences: Sequence[float], correct: Sequence[float]) -> float | None:
    """Mean distance between confidence and accuracy over bins of equal width, weighted by their answers (Guo et al., 2017,
    arXiv:1706.04599); None without answers.

    Args:
        confidences: in [0, 1]; their bins: ``confidence_bins``.
        correct: 1 for a correct answer, else 0.
    """
    if not len(confidences):
        return None
    values = np.asarray(confidences, dtype=float)
    weights = np.asarray(correct, dtype=float) - values
    gaps = np.bincount(confidence_bins(confidences), weights=weights, minlength=CALIBRATION_BINS)
    return float(np.abs(gaps).sum() / len(values))


def _by_document(samples: Sequence[Mapping[str, Any]], model: str) -> dict[tuple[Any, Any], Mapping[str, Any]]:
    documents = {(sample["doc_id"], sample["doc_hash"]): sample for sample in samples}
    if len(documents) != len(samples):
        raise UserError(
            f"the samples of {model} have {len(samples) - len(documents)} documents twice; evaluate it again"
        )
    return documents


def _clusters(samples: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """The positions of each cluster's documents; a document without a cluster is a separate one."""
    clusters: defaultdict[Any, list[int]] = defaultdict(list)
    for number, sample in enumerate(samples):
        cluster = sample.get("cluster")
        clusters[("document", number) if cluster is None else ("cluster", cluster)].append(number)
    return list(clusters.values())


def _cluster_means(values: Array, samples: Sequence[Mapping[str, Any]]) -> Array:
    return np.array([math.fsum(values[members]) / len(members) for members in _clusters(samples)])


def _bootstrap(values: Array) -> tuple[float, float, float]:
    """Standard error of the mean, and its BCa interval (Efron, 1987). values: [n]"""
    n = len(values)
    if n == 1:
        return math.nan, math.nan, math.nan
    mean = float(values.mean())
    if np.ptp(values) == 0:  # BCa would divide by zero
        return 0.0, mean, mean
    means = _resampled_means(values)
    tolerance = 1e-12 * float(np.abs(values).max())  # sums in another order differ in their last bits
    num_below, num_above = np.sum(means < mean - tolerance), np.sum(means > mean + tolerance)
    bias = norm.ppf((RESAMPLES + num_below - num_above) / (2 * RESAMPLES))
    centred = values - mean
    acceleration = np.sum(centred**3) / (6 * np.sum(centred**2) ** 1.5)  # the jackknife's, which for a mean is this
    shifted = bias + np.array([-Z, Z])
    low, high = np.quantile(means, norm.cdf(bias + shifted / (1 - acceleration * shifted)))
    return float(values.std(ddof=1)) / math.sqrt(n), float(low), float(high)


def _resampled_means(values: Array) -> Array:
    """Means of ``RESAMPLES`` draws of n values with replacement. values: [n]"""
    rng = np.random.default_rng(0)
    n = len(values)
    distinct, counts = np.unique(values, return_counts=True)
    if len(distinct) * 20 <= n:  # how often each value is drawn: the same distribution, much faster
        return rng.multinomial(n, counts / n, size=RESAMPLES) @ distinct / n
    return np.concatenate([values[rows].mean(1) for rows in _drawn_rows(rng, n, RESAMPLES)])


def _drawn_rows(rng: np.random.Generator, n: int, number: int) -> Iterator[NDArray[np.int64]]:
    """[draws, n] positions, drawn with replacement: ``number`` draws, some at a time."""
    step = max(1, _CHUNK // n)
    for start in range(0, number, step):
        yield rng.integers(0, n, size=(min(step, number - start), n))


def _mcnemar(differences: Array) -> float:
    """Exact, of differences that are -1, 0 or 1: under no change, gains and losses are equally likely."""
    gains, losses = int(np.sum(differences > 0)), int(np.sum(differences < 0))
    return 1.0 if gains + losses == 0 else float(binomtest(gains, gains + losses, 0.5).pvalue)


def _sign_flip(differences: Array) -> float:
    """Under no change, each difference is as likely with the other sign. All sign flips if they are few, else random ones."""
    values = differences[differences != 0]
    n = len(values)
    if n == 0:
        return 1.0
    limit = abs(values.sum()) - 1e-9 * np.abs(values).sum()  # sums in another order differ in their last bits
    if n <= _EXACT_FLIPS:
        signs = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float(np.mean(np.abs((2 * signs - 1) @ values) >= limit))
    rng = np.random.default_rng(0)
    num_extreme, rows = 0, max(1, _CHUNK // n)
    for start in range(0, RESAMPLES, rows):
        size = (min(rows, RESAMPLES - start), n)
        sums = 2 * (rng.integers(0, 2, size=size, dtype=np.uint8) @ values) - values.sum()
        num_extreme += int(np.sum(np.abs(sums) >= limit))
    return (num_extreme + 1) / (RESAMPLES + 1)  # the data themselves are one of the flips
