"""How far a model has moved from the pretrained one on its answers to prompts, by groups of prompts and with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

MIN_ROWS = 8
"""Of a group, for an interval."""
_RESAMPLES = 2000
STUDY = {2.5e-5: 0.11, 5e-5: 0.20, 1e-4: 0.42, 2e-4: 0.74, 4e-4: 1.08, 8e-4: 1.61}
"""The KL at which cosine SFT ended in studies/smollm2_tofu, by its rate: means over seeds."""


def divergence(sums: torch.Tensor, counts: Sequence[int], groups: Sequence[str] = ()) -> dict[str, float]:
    """The mean KL divergence per token, in nats: ``kl``, and for at least 8 prompts its 95% interval by a bootstrap over them, ``kl_low`` and
    ``kl_high``; the same of each group, ``kl/GROUP`` and so on.

    Args:
        sums: [prompts] the KL summed over the tokens of each answer, in nats.
        counts: their tokens.
        groups: of each prompt; empty: there are none.
    """
    pairs = torch.stack([sums.detach().double().cpu(), torch.tensor(counts, dtype=torch.float64)])
    metrics = _with_interval(pairs)
    for group in dict.fromkeys(groups):
        members = [index for index, each in enumerate(groups) if each == group]
        metrics |= {f"{key}/{group}": value for key, value in _with_interval(pairs[:, members]).items()}
    return metrics


def _with_interval(pairs: torch.Tensor) -> dict[str, float]:
    kl = {"kl": float(pairs[0].sum() / pairs[1].sum())}
    number = pairs.shape[1]
    if number < MIN_ROWS:
        return kl
    # On the host and seeded: every rank has the same interval, and equal weights have it again.
    draws = torch.randint(number, (_RESAMPLES, number), generator=torch.Generator().manual_seed(0))
    sums, counts = pairs[:, draws].sum(2)
    ends = (sums / counts).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return {**kl, "kl_low": ends[0], "kl_high": ends[1]}


def moved_groups(metrics: Mapping[str, Any]) -> list[str]:
    """Of the groups with an interval up to three that moved most, and the one that moved least; empty for fewer than two."""
    names = [
        key.removeprefix("kl_low/") for key, value in metrics.items() if key.startswith("kl_low/") and value is not None
    ]
    names.sort(key=lambda group: -metrics[f"kl/{group}"])
    return [*names[:-1][:3], names[-1]] if len(names) > 1 else []


def describe(metrics: Mapping[str, Any]) -> str:
    """Which groups moved, in words; empty for fewer than two with an interval."""
    texts = [
        f"{group} {metrics[f'kl/{group}']:.2f} [{metrics[f'kl_low/{group}']:.2f}, {metrics[f'kl_high/{group}']:.2f}]"
        for group in moved_groups(metrics)
    ]
    return f"most of {', '.join(texts[:-1])}; least of {texts[-1]} (95% over prompts)" if texts else ""


def scale(kl: float) -> str:
    """What a KL divergence, in nats, has meant elsewhere."""
    rate = min(STUDY, key=lambda rate: abs(STUDY[rate] - kl))
    ends = (
        f"{STUDY[rate]:.2f} with rate {rate:g} ({min(STUDY.values()):.2f} to {max(STUDY.values()):.2f} with all rates)"
    )
    return f"a KL of {kl:.2f}: in studies/smollm2_tofu cosine SFT ended at {ends}, on other prompts"
