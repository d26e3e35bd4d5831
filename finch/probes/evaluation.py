"""What is measured on a probe's rows with the current weights: losses, accuracy, and the KL to the pretrained model; on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from finch.data.loader import REFERENCES, Batch, EvalLoader, EvalSettings
from finch.data.prompts import num_targets
from finch.objectives.divergence import divergence
from finch.probes.kinds import ProbeRows, Question
from finch.training.readouts import Readout, kl_from
from finch.training.reference import iter_outputs


def evaluate(model: nn.Module, name: str, rows: ProbeRows, settings: EvalSettings) -> dict[str, float]:
    """The metrics of a probe by their short names; a collective. Random states, the model's mode and its weights stay as they are.

    ``loss`` is the mean over all target tokens in nats, of a multiple-choice probe over those of the right choices. ``accuracy`` is the share
    of questions whose right choice has the largest log-likelihood per character (acc_norm in lm-eval). ``kl`` is the mean KL divergence from
    the pretrained model to this one at the answers' tokens, in nats; of at least 8 rows with ``kl_low`` and ``kl_high``, its 95% interval by a
    bootstrap over the rows. Rows with groups have ``accuracy/GROUP`` and so on too, those of kind self the KL alone.
    """
    has_kl = REFERENCES[0] in rows.samples[0]
    sums = _sums(model, settings.loader(f"probes.{name}", rows.samples), has_kl=has_kl)
    metrics = probe_metrics(sums[0], rows)
    if has_kl:
        return metrics | divergence(sums[1], list(map(num_targets, rows.samples)), rows.groups)
    for group in dict.fromkeys(rows.groups):
        indices, part = rows.group(group)
        metrics |= {f"{key}/{group}": value for key, value in probe_metrics(sums[0, indices], part).items()}
    return metrics


def probe_metrics(losses: torch.Tensor, rows: ProbeRows) -> dict[str, float]:
    """``loss``, and of a multiple-choice probe ``accuracy``, from [samples] sums over their targets in nats; see :func:`evaluate`."""
    counts = torch.tensor([num_targets(sample) for sample in rows.samples], dtype=torch.float64)
    if rows.questions:
        return _multiple_choice(losses, counts, rows.questions)
    return {"loss": float(losses.sum() / counts.sum())}


def _sums(model: nn.Module, loader: EvalLoader, *, has_kl: bool) -> torch.Tensor:
    """[2, samples] each sample's sum of losses and of KL divergences over its targets, in nats, on the host; the same on every rank."""
    parallel = loader.parallel
    sums = torch.zeros(2, len(loader.samples) + 1, dtype=torch.float64, device=parallel.device)  # the last: EMPTY, -1

    def readouts(batch: Batch) -> list[Readout]:
        return [kl_from(*map(batch.__getitem__, REFERENCES))] if has_kl else []

    for indices, _, output in iter_outputs(model, loader, readouts):
        values = torch.stack(list(output.values()))
        sums[: len(values), indices] = values.sum(2, dtype=torch.float64)
    return parallel.all_reduce_sum_(sums)[:, :-1].cpu()  # every sample is on one rank only: the sum adds zeros


def _multiple_choice(losses: torch.Tensor, counts: torch.Tensor, questions: Sequence[Question]) -> dict[str, float]:
    """``loss`` and ``accuracy`` from ``losses`` and ``counts``, [choices of all questions]."""
    num_right, right, start = 0, [], 0
    for question in questions:
        lengths = torch.tensor([len(choice) for choice in question.choices], dtype=torch.float64)
        scores = -losses[start : start + len(lengths)] / lengths
        num_right += int(scores.argmax()) == question.answer
        right.append(start + question.answer)
        start += len(lengths)
    return {"loss": float(losses[right].sum() / counts[right].sum()), "accuracy": num_right / len(questions)}
