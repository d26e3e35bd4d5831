"""The time of a step from its operations and bytes, at given rates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finch.estimate.fake_step import StepEstimate
from finch.estimate.step_trace import RECOMPUTATION


@dataclass(frozen=True)
class StepTime:
    """Seconds. Neither the rate nor the bandwidth of memory is modelled: operations that are no matrix products take no time here.

    Attributes:
        compute: operations, recomputed ones included, over the matrix rate.
        communication: bytes that a rank sends in a ring over the bandwidth; None where it is not given and bytes are sent.
    """

    compute: float
    communication: float | None

    @property
    def overlapped(self) -> float:
        """Where communication hides behind computation completely, which is the least that a step can take."""
        return max(self.compute, self.communication or 0.0)

    @property
    def sequential(self) -> float:
        """Where nothing overlaps."""
        return self.compute + (self.communication or 0.0)


def step_time(step: StepEstimate, *, matmul_tflops: float, bandwidth_gb_s: float | None) -> StepTime:
    """
    Args:
        matmul_tflops: the device's measured rate of matrix products in the run's dtype, in TFLOP/s.
        bandwidth_gb_s: that of a rank in one direction, in GB/s (1e9 bytes).
    """
    sent = sent_bytes(step)
    communication = None if bandwidth_gb_s is None else sent / (bandwidth_gb_s * 1e9)
    return StepTime(sum(step.flops.values()) / (matmul_tflops * 1e12), communication if sent else 0.0)


def needed_flops(step: StepEstimate) -> int:
    """Without recomputation."""
    return sum(flops for phase, flops in step.flops.items() if phase != RECOMPUTATION)


def sent_bytes(step: StepEstimate) -> int:
    """Of all collectives of a step, by one rank."""
    return sum(collective.sent_bytes for collective in step.collectives)


def summed_collectives(step: StepEstimate) -> Sequence[tuple[str, int, int, int]]:
    """Kind, count, bytes of the complete tensors and bytes that a rank sends, largest first."""
    kinds = {collective.kind for collective in step.collectives}
    rows = []
    for kind in kinds:
        calls = [collective for collective in step.collectives if collective.kind == kind]
        rows.append((kind, len(calls), sum(call.nbytes for call in calls), sum(call.sent_bytes for call in calls)))
    return sorted(rows, key=lambda row: -row[2])
