"""What is measured on a probe's rows with the current weights: losses, accuracy, and the KL to the pretrained model; on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from finch.data.dataset import Samples
from finch.data.loader import Batch, Collate, EvalLoader
from finch.data.order import EMPTY
from finch.distributed.parallel import Parallel
from finch.objectives import IGNORE_INDEX
from finch.probes.rows import ProbeRows, Question, Sample, num_targets
from finch.training.reference import iter_outputs

REFERENCES = ("reference_log_probs", "reference_tokens")
"""Keys of a sample: the pretrained model's distributions at its targets, see :func:`finch.objectives.regularization.top_log_probs`."""


@dataclass(frozen=True)
class EvalSettings:
    """What all probes of a run share: ``collator`` as :func:`finch.data.loader.collator`, ``batch_size`` per forward pass and rank in training."""

    parallel: Parallel
    collator: Callable[[Samples], Collate]
    batch_size: int

    def loader(self, name: str, samples: Sequence[Sample]) -> EvalLoader:
        data = Samples(samples, f"probes.{name}", f"probes.{name}")
        data.lengths = torch.tensor([len(sample["tokens"]) for sample in samples], dtype=torch.int32)
        collate = _with_references(self.collator(data))
        return EvalLoader(data, collate, self.parallel, self.batch_size)


def evaluate(model: nn.Module, name: str, rows: ProbeRows, settings: EvalSettings) -> dict[str, float]:
    """The metrics of a probe by their short names; a collective. Random states, the model's mode and its weights stay as they are.

    ``loss`` is the mean over all target tokens in nats, of a multiple-choice probe over those of the right choices. ``accuracy`` is the share
    of questions whose right choice has the largest log-likelihood per character (acc_norm in lm-eval). ``kl`` is the mean KL divergence from
    the pretrained model to this one at the answers' tokens, in nats.
    """
    has_kl = REFERENCES[0] in rows.samples[0]
    sums = _sums(model, settings.loader(name, rows.samples), settings.parallel, has_kl=has_kl)
    metrics = probe_metrics(sums[0], rows)
    if has_kl:
        metrics["kl"] = float(sums[1].sum() / sum(map(num_targets, rows.samples)))
    return metrics


def probe_metrics(losses: torch.Tensor, rows: ProbeRows) -> dict[str, float]:
    """``loss``, and of a multiple-choice probe ``accuracy``, from [samples] sums over their targets in nats; see :func:`evaluate`."""
    counts = torch.tensor([num_targets(sample) for sample in rows.samples], dtype=torch.float64)
    if rows.questions:
        return _multiple_choice(losses, counts, rows.questions)
    return {"loss": float(losses.sum() / counts.sum())}


def _sums(model: nn.Module, loader: EvalLoader, parallel: Parallel, *, has_kl: bool) -> torch.Tensor:
    """[2, samples] each sample's sum of losses and of KL divergences over its targets, in nats, on the host; the same on every rank."""
    sums = torch.zeros(2, len(loader.samples), dtype=torch.float64, device=parallel.device)
    options = {"has_kl": True} if has_kl else {}
    for indices, _, output in iter_outputs(model, loader, **options):
        found = torch.stack([output["loss"], output["kl"]] if has_kl else [output]).sum(
            2, dtype=torch.float64
        )  # [kinds, batch]
        kept = torch.tensor([index != EMPTY for index in indices])
        at = torch.tensor(indices)[kept].to(parallel.device)
        sums[: len(found), at] = found[:, kept.to(parallel.device)]
    return parallel.all_reduce_sum_(sums).cpu()  # every sample is on one rank only: the sum adds zeros


def _multiple_choice(losses: torch.Tensor, counts: torch.Tensor, questions: Sequence[Question]) -> dict[str, float]:
    """``losses``, ``counts``: [choices of all questions]."""
    num_right, right, start = 0, [], 0
    for question in questions:
        lengths = torch.tensor([len(choice) for choice in question.choices], dtype=torch.float64)
        scores = -losses[start : start + len(lengths)] / lengths
        num_right += int(scores.argmax()) == question.answer
        right.append(start + question.answer)
        start += len(lengths)
    return {"loss": float(losses[right].sum() / counts[right].sum()), "accuracy": num_right / len(questions)}


def _with_references(collate: Collate) -> Collate:
    """Adds the pretrained model's distributions, [targets of the batch, ...] in the order of the targets, where samples have them."""

    def collated(rows: list[dict[str, Any]]) -> Batch:
        if REFERENCES[0] not in rows[0]:
            return collate(rows)
        # An empty row is a copy of another one without its targets.
        parts = {
            key: [row[key] if any(label != IGNORE_INDEX for label in row["labels"]) else row[key][:0] for row in rows]
            for key in REFERENCES
        }
        batch = collate([{key: value for key, value in row.items() if key not in REFERENCES} for row in rows])
        return {**batch, **{key: torch.cat(values) for key, values in parts.items()}}

    return collated
