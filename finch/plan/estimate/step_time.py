"""How long a step takes by what limits it, at rates that were given or that `finch doctor --gpu` has measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finch.base.errors import UserError

if TYPE_CHECKING:
    from finch.plan.estimate.fake_step import StepEstimate

# What the check's lines are called; of products and all-reduces the beginning.
MATRIX_PRODUCTS, ALL_REDUCE = "matrix products of", "all-reduce over"
COPY = "copy on the device, GB/s read and written"
LAUNCH, COLLECTIVE = "host's time for an operator of a layer, us", "host's time for a collective of FSDP2, us"


@dataclass(frozen=True)
class Rates:
    """Of one device and its host; None: unknown.

    Attributes:
        matmul_tflops: of matrix products, in TFLOP/s.
        memory_gb_s: that an operator reads and writes, in GB/s (1e9 bytes).
        launch_us: that the host takes for an operator, in microseconds.
        bandwidth_gb_s: to the other ranks in one direction, in GB/s.
        node_bandwidth_gb_s: the same to ranks on other nodes; None: as to all.
        collective_us: that the host takes for a collective, with FSDP2's hooks and copies, in microseconds.
    """

    matmul_tflops: float | None = None
    memory_gb_s: float | None = None
    launch_us: float | None = None
    bandwidth_gb_s: float | None = None
    node_bandwidth_gb_s: float | None = None
    collective_us: float | None = None

    def seconds(self, step: StepEstimate, gpus_per_node: int = 8) -> Mapping[str, float]:
        """Of a step, by what would limit it alone: products, memory, host, network. Those of unknown rates are left out."""
        found = {}
        if self.matmul_tflops:
            found["products"] = sum(step.flops.values()) / (self.matmul_tflops * 1e12)
        if self.memory_gb_s:
            found["memory"] = sum(step.moved_bytes.values()) / (self.memory_gb_s * 1e9)
        if self.launch_us:
            collectives = len(step.collectives) * (self.collective_us or 0)
            found["host"] = (sum(step.launches.values()) * self.launch_us + collectives) / 1e6
        if self.bandwidth_gb_s and step.sent_bytes:
            inside = self.bandwidth_gb_s * 1e9
            between = inside if self.node_bandwidth_gb_s is None else self.node_bandwidth_gb_s * 1e9
            # A ring over nodes is as slow as its slowest link.
            sent = (
                (each.sent_bytes, between if each.farthest >= gpus_per_node else inside) for each in step.collectives
            )
            found["network"] = sum(nbytes / rate for nbytes, rate in sent)
        return found


def read_rates(file: str, dtype: str) -> Rates:
    """What a gpu_check.json has measured; ``dtype``: of the products, as ``bfloat16``. Raises UserError if it is none."""
    try:
        phases = json.loads(Path(file).read_text(encoding="utf-8"))["phases"]
        lines = [(line["name"], line["seen"]) for phase in phases for line in phase["lines"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--rates {file} is no gpu_check.json of `finch doctor --gpu`; give one, or the rates"
        ) from error

    def first(beginning: str, word: str = "") -> float | None:
        return next((float(seen) for name, seen in lines if name.startswith(beginning) and word in name and seen), None)

    rates = first(MATRIX_PRODUCTS, dtype), first(COPY), first(LAUNCH), first(ALL_REDUCE)
    return Rates(*rates, collective_us=first(COLLECTIVE))
