"""Statistics: equal to scipy's, to closed forms and to a few plain lines; the interval covers as often as it says."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats

from finch.base.errors import UserError
from finch.evaluation.statistics import (
    MCNEMAR,
    SIGN_FLIP,
    expected_calibration_error,
    half_width,
    holm,
    mean_interval,
    paired_delta,
)

NOISE = 0.2
"""In standard errors: four times the standard deviation of the difference between two BCa limits of 10,000 resamples each."""


def samples(scores, clusters=None):
    rows = [{"doc_id": number, "doc_hash": f"h{number}", "score": score} for number, score in enumerate(scores)]
    return rows if clusters is None else [row | {"cluster": name} for row, name in zip(rows, clusters, strict=True)]


def binary(n, rate, seed):
    return (np.random.default_rng(seed).random(n) < rate).astype(float).tolist()


@pytest.mark.parametrize("draw", ["normal", "lognormal", "binary"])
def test_paired_delta_equals_scipy(draw):
    rng = np.random.default_rng(3)
    n = 60
    base = np.array(binary(n, 0.5, 1)) if draw == "binary" else rng.normal(size=n)
    tuned = np.array(binary(n, 0.6, 2)) if draw == "binary" else base + getattr(rng, draw)(size=n)
    result = paired_delta(samples(base), samples(tuned)[::-1])
    difference = tuned - base
    assert result.mean == pytest.approx(tuned.mean() - base.mean(), abs=1e-12)
    assert result.standard_error == pytest.approx(stats.sem(difference), rel=1e-12)
    expected = stats.bootstrap((difference,), np.mean, n_resamples=10_000, method="BCa", batch=500, rng=1)
    limits = tuple(expected.confidence_interval)
    assert (result.low, result.high) == pytest.approx(limits, abs=NOISE * result.standard_error)
    assert (result.n, result.n_clusters) == (n, n)
    assert result == paired_delta(samples(base), samples(tuned))


def test_interval_covers_as_often_as_it_says():
    rng, trials, n, covered = np.random.default_rng(0), 300, 80, 0
    for _ in range(trials):
        base = rng.random(n) < 0.7
        tuned = np.where(rng.random(n) < 0.3, rng.random(n) < 0.2, base)  # the expected delta is 0.3 * (0.2 - 0.7)
        result = paired_delta(samples(base.astype(float)), samples(tuned.astype(float)))
        covered += result.low <= -0.15 <= result.high
    assert 0.92 <= covered / trials <= 0.98


@pytest.mark.parametrize(
    ("base", "change", "p_value"),
    [
        (np.arange(20) / 32, 0.0, 1.0),
        (np.arange(20) / 32, 0.25, pytest.approx(1e-4, rel=0.01)),
        (np.zeros(1), 1.0, 1.0),
    ],
)
def test_equal_differences_have_no_interval(base, change, p_value):
    result = paired_delta(samples(base), samples(base + change))
    assert (result.mean, result.p_value) == (change, p_value)
    assert np.isnan([result.standard_error, result.low, result.high]).all()


def test_interval_is_ordered_and_finite():
    for n, ones in itertools.product((2, 3, 10, 400), (1, 2)):
        values = [1.0] * ones + [0.0] * (n - ones)
        if ones == n:
            continue
        result = paired_delta(samples([0.0] * n), samples(values))
        assert 0 <= result.low <= result.mean <= result.high <= 1


@pytest.mark.parametrize(("gains", "losses"), [(0, 0), (3, 0), (9, 2), (30, 41), (5, 5)])
def test_mcnemar_equals_the_binomial_sum(gains, losses):
    base, tuned = [0] * gains + [1] * losses + [1] * 20, [1] * gains + [0] * losses + [1] * 20
    result = paired_delta(samples(base), samples(tuned))
    n = gains + losses
    tail = sum(math.comb(n, k) for k in range(min(gains, losses) + 1)) / 2**n
    assert (result.test, result.p_value) == (MCNEMAR, pytest.approx(min(1.0, 2 * tail)))


def test_sign_flip_of_few_differences_is_exact():
    difference = np.array([0.4, 0.1, 0.25, 0.3, -0.05, 0.2, 0.0])
    sums = [abs(np.dot(signs, difference)) for signs in itertools.product((1, -1), repeat=len(difference))]
    result = paired_delta(samples([0.5] * 7), samples(0.5 + difference))
    assert result.test == SIGN_FLIP
    assert result.p_value == np.mean(np.array(sums) >= abs(difference.sum()) - 1e-9)


def test_sign_flip_equals_scipy():
    difference = np.random.default_rng(5).normal(0.15, 1, size=120)
    expected = stats.permutation_test(
        (difference,), np.mean, permutation_type="samples", n_resamples=9999, rng=2
    ).pvalue
    assert paired_delta(samples([0.0] * 120), samples(difference)).p_value == pytest.approx(expected, abs=0.02)


def test_clusters_are_averaged_first():
    rng = np.random.default_rng(4)
    names = [f"question {number}" for number in range(60) for _ in range(2)]
    base, tuned = binary(120, 0.5, 6), binary(120, 0.7, 7)
    means = defaultdict(list)
    for name, before, after in zip(names, base, tuned, strict=True):
        means[name].append(after - before)
    pairs = np.array([np.mean(each) for each in means.values()])
    order = rng.permutation(120)
    result = paired_delta([samples(base, names)[i] for i in order], samples(tuned, names))
    assert result.mean == pytest.approx(np.mean(tuned) - np.mean(base))
    assert result.standard_error == pytest.approx(pairs.std(ddof=1) / math.sqrt(60))
    assert (result.n, result.n_clusters, result.test) == (120, 60, SIGN_FLIP)
    mean = mean_interval(samples(tuned, names))
    assert mean.standard_error == pytest.approx(stats.sem(np.reshape(tuned, (60, 2)).mean(1)))
    # Each document twice is no more evidence than once.
    twice = paired_delta(samples(base + base, [*range(120)] * 2), samples(tuned + tuned, [*range(120)] * 2))
    once = paired_delta(samples(base), samples(tuned))
    assert (twice.low, twice.high, twice.standard_error) == (once.low, once.high, once.standard_error)


def test_documents_without_a_score_are_left_out():
    result = paired_delta(samples([0, None, 1, 1]), samples([1, 1, None, 0]))
    assert (result.mean, result.n) == (0.0, 2)
    assert mean_interval(samples([0, None, 1])).mean == 0.5
    with pytest.raises(UserError, match="no document has a score from both"):
        paired_delta(samples([0, None]), samples([None, 1]))
    with pytest.raises(UserError, match="no document has a score"):
        mean_interval(samples([None]))


def test_different_documents_are_refused():
    with pytest.raises(UserError, match=r"\(1 only by the base, 0 only by the tuned model, 2 by both\)"):
        paired_delta(samples([0, 1, 1]), samples([0, 1]))
    changed = samples([0, 1])
    changed[1]["doc_hash"] = "other"
    with pytest.raises(UserError, match="different documents"):
        paired_delta(samples([0, 1]), changed)
    with pytest.raises(UserError, match="the samples of the tuned model have 1 documents twice"):
        paired_delta(samples([0]), samples([0]) * 2)


def test_mean_interval_of_a_loss_of_0_is_no_rate():
    result = mean_interval(samples([0.0] * 40), is_share=False)
    assert (result.low, result.mean, result.high) == (0, 0, 0)


@pytest.mark.parametrize(("correct", "n"), [(0, 40), (40, 40), (25, 100), (3, 7)])
def test_mean_interval_of_rates_is_wilsons(correct, n):
    result = mean_interval(samples([1] * correct + [0] * (n - correct)))
    z, p = 1.959963984540054, correct / n
    centre, margin = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    expected = [(centre - margin) / (1 + z * z / n), (centre + margin) / (1 + z * z / n)]
    assert [result.low, result.high] == pytest.approx(expected, abs=1e-12)
    assert result.mean == p


def test_holm_of_known_values():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


@pytest.mark.parametrize(("n", "points"), [(120, 8.9), (400, 4.9), (541, 4.2), (10_000, 1.0)])
def test_half_width_of_known_sizes(n, points):
    assert round(100 * half_width(0.5, n), 1) == points


def test_calibration_by_hand():
    confidences, correct = [0.9, 0.9, 0.7, 0.65, 0.0, 1.0], [1, 0, 1, 0, 0, 1]
    # Bins: (0.8, 0.9] two answers, (0.6, 0.7] two, [0, 0.1] one, (0.9, 1] one.
    expected = (2 * abs(0.5 - 0.9) + 2 * abs(0.5 - 0.675) + 0 + 0) / 6
    assert expected_calibration_error(confidences, correct) == pytest.approx(expected)
    assert expected_calibration_error([], []) is None


@pytest.mark.parametrize("tenths", range(11))
def test_calibration_bins_end_at_round_numbers(tenths):
    # A confidence a little below is in the same bin, where errors of opposite sign cancel.
    confidence = tenths / 10
    pair = [confidence, max(confidence - 0.04, 0.0)]
    assert expected_calibration_error(pair, [1, 0]) == pytest.approx(abs(1 - sum(pair)) / 2)
