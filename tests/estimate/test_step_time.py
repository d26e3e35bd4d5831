"""Step time from given rates."""

from collections import Counter

import pytest

from finch.estimate.collectives import ALL_GATHER, ALL_REDUCE, Collective
from finch.estimate.fake_step import StepEstimate
from finch.estimate.step_time import needed_flops, sent_bytes, step_time, summed_collectives

CALLS = (Collective(ALL_GATHER, 4 * 10**9, 4), Collective(ALL_REDUCE, 4, 4), Collective(ALL_GATHER, 4 * 10**9, 4))
FLOPS = Counter(forward=10**12, recomputation=10**12, backward=2 * 10**12)


def make_step(collectives=CALLS):
    return StepEstimate(1, 1, 4, {}, 0, "forward", {}, collectives, FLOPS, 1, 1)


def test_time_is_operations_and_bytes_over_their_rates():
    time = step_time(make_step(), matmul_tflops=2, bandwidth_gb_s=3)
    assert time.compute == 2.0  # recomputation takes time, though it is not needed
    assert time.communication == pytest.approx(2.0)
    assert time.overlapped == pytest.approx(2.0)
    assert time.sequential == pytest.approx(4.0)
    assert needed_flops(make_step()) == 3 * 10**12


def test_communication_is_unknown_without_a_bandwidth():
    assert step_time(make_step(), matmul_tflops=2, bandwidth_gb_s=None).communication is None
    assert step_time(make_step(()), matmul_tflops=2, bandwidth_gb_s=None).sequential == 2.0


def test_collectives_are_summed_by_kind():
    assert summed_collectives(make_step()) == [(ALL_GATHER, 2, 8 * 10**9, 6 * 10**9), (ALL_REDUCE, 1, 4, 6)]
    assert sent_bytes(make_step()) == 6 * 10**9 + 6
