"""Losses from the outputs of transformers' models: the cross-entropies of target tokens, and finch's objectives as ``compute_loss_func``
of the Trainer and TRL's SFTTrainer."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from finch.base.errors import UserError
from finch.integrations.step_loss import MeanLoss
from finch.objectives import EAFT, IGNORE_INDEX, Objective

_AGREEMENT = 1e-3  # relative; a smoothed loss differs by more, an added term may not
_SCALINGS = ("DivBackward0", "MulBackward0", "ToCopyBackward0")  # autograd's names
_REPLAYING = "_WithTermBackward"  # of finch.integrations.transformers: the value is the first input's


class ObjectiveLoss:
    """A reweighted loss for the Trainer, sum(weights * token losses) / target tokens of the complete step.

        loss = ObjectiveLoss(DFT())
        Trainer(..., compute_loss_func=loss, callbacks=[FinchCallback(..., compute_loss_func=loss)])

    The callback then takes the unweighted losses from here. Evaluation reports the unweighted loss.

    The Trainer passes one micro-batch's logits and labels, so this serves the objectives that need no more: CrossEntropy, DFT, EAFT, and
    TALR with a number for tau. FLOW and STM need the pretrained model's losses, TALR's other forms the median over the step's batch:
    finch's recipes have both. Raises UserError for such an objective.

    ``step_loss`` takes the unweighted losses of training; set by ``FinchCallback``.
    """

    def __init__(self, objective: Objective) -> None:
        name = type(objective).__name__
        if missing := objective.needs - {"top_logits"}:
            raise UserError(
                f"objective={name}: it needs {', '.join(sorted(missing))}, which compute_loss_func does not get; use finch's recipe"
            )
        if objective.statistic is not None:
            raise UserError(
                f"objective={name}: its statistic={objective.statistic} is a median over the step's batch, and compute_loss_func sees one "
                "micro-batch; pass a number of nats, as TALR(tau=1.5), or use finch's recipe"
            )
        self.objective = objective
        self.step_loss: MeanLoss | None = None

    def __call__(
        self, outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The loss of a micro-batch, [] fp32, graph attached.

        Args:
            outputs: of the model, with ``logits``, [batch, seq, vocab].
            labels: [batch, seq], not shifted, -100 where ignored.
            num_items_in_batch: [] target tokens of the step; None divides by the micro-batch's own, as in evaluation.
        """
        targets = shift(labels)
        losses = token_losses(outputs.logits, targets)
        num_targets = (targets != IGNORE_INDEX).sum()
        denominator = num_targets.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if not torch.is_grad_enabled():
            return losses.sum() / denominator
        if self.step_loss is not None:
            self.step_loss.update(losses.detach().double().sum(), num_targets)
        batch = {"labels": targets}
        if "top_logits" in self.objective.needs:
            logits = outputs.logits[:, -targets.shape[1] :].detach()
            batch["top_logits"] = logits.topk(min(EAFT.num_logits, logits.shape[-1]), dim=-1).values
        return (self.objective.weights(losses.detach(), batch) * losses).sum() / denominator


def shift(labels: torch.Tensor) -> torch.Tensor:
    """[batch, seq] labels of transformers, each moved to the token that predicts it; -100 at a row's last."""
    return F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropies, [batch, seq] fp32 or wider in nats, graph attached; 0 where ignored.

    ``logits``: [batch, seq, vocab]; only the last positions are used where there are more than targets, as with PEFT's virtual tokens;
    ``targets``: [batch, seq], shifted, -100 where ignored.
    """
    logits = logits[:, -targets.shape[1] :]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    targets = targets.to(logits.device)
    losses = F.cross_entropy(wide.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view_as(targets)


@torch.no_grad()
def uniform_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What label smoothing adds a share of: the cross-entropies against all tokens alike, [] their sum over the targets in nats, and [] their number.
    Arguments as for :func:`token_losses`."""
    is_target = targets.to(logits.device) != IGNORE_INDEX
    losses = -logits[:, -targets.shape[1] :].float().log_softmax(-1).mean(-1)
    return (losses * is_target).double().sum(), is_target.sum()


class LossReader:
    """Sums the unweighted cross-entropies of a batch, without a second pass over the logits where the model's own loss will do.

    The model's loss is used where autograd's graph holds no other term, as a penalty that is 0 in the first step, and where in the first
    batches it equals the mean cross-entropy of the logits. Else (an auxiliary loss of experts, a model with another loss) the logits are.
    Without gradients, as in evaluation, the first batches decide alone. ``read`` may be a part of a compiled graph, which shows nothing of
    autograd's: there the logits are used, in a pass without copies. ``decide`` waits for the device.
    """

    def __init__(self) -> None:
        self._is_model_loss_plain: bool | None = None
        self._seen: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # of each batch: whether it is, and whether there were targets

    @torch.no_grad()
    def read(self, output: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums the losses of a batch: loss_sum [] in nats, and num_targets [].

        Args:
            output: of the model: TRL's with ``log_probs``, or one with ``logits``, [batch, seq, vocab].
            batch: the model's arguments: ``labels`` or ``shift_labels``, [batch, seq], and ``num_items_in_batch``, by which the model
                divides its loss, if not by the batch's own target tokens.

        Raises UserError if the output has neither log-probabilities nor logits, nor a loss.
        """
        if (log_probs := getattr(output, "log_probs", None)) is not None:
            return -log_probs.double().sum(), output.label_mask.sum()
        shifted = batch.get("shift_labels")
        targets = shift(batch["labels"]) if shifted is None else shifted
        num_targets = (targets != IGNORE_INDEX).sum()
        loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
        num_items = batch.get("num_items_in_batch")
        model_sum = None if loss is None else loss.double() * (num_targets if num_items is None else num_items)
        if logits is None:
            if model_sum is None:
                raise UserError(
                    f"model={type(output).__name__}: FINCH needs logits, a loss or log_probs in the model's output; leave return_dict on"
                )
            return model_sum, num_targets  # a fused loss, as Liger's
        if getattr(output, "aux_loss", None) is not None or not _may_be_cross_entropy(loss):
            model_sum = None  # a resumed run, of another first loss, must decide the same
        if model_sum is not None and self._is_model_loss_plain:
            return model_sum, num_targets
        exact = token_losses(logits, targets).double().sum()
        if model_sum is not None and self._is_model_loss_plain is None:
            has_targets = num_targets > 0
            is_plain = has_targets & ((model_sum - exact).abs() <= _AGREEMENT * exact.abs())
            self._seen.append((is_plain, has_targets))
            # As for the batches after it: a resumed run has other first batches.
            return torch.where(is_plain, model_sum, exact), num_targets
        return exact, num_targets

    def decide(self) -> None:
        """After the first batches, outside of the model."""
        if any(has_targets for _, has_targets in self._seen):
            self._is_model_loss_plain = all(is_plain for is_plain, has_targets in self._seen if has_targets)
        self._seen.clear()


def _may_be_cross_entropy(loss: torch.Tensor | None) -> bool:
    """Whether ``loss``, [], is by autograd's graph that of ``F.cross_entropy``, divided or multiplied by constants; where there is no graph,
    as in evaluation, it may be, and where the graph cannot be seen, as in a compiled model, it may not."""
    if loss is None or torch.compiler.is_compiling():
        return False
    node = loss.grad_fn
    while node is not None and node.name() in (*_SCALINGS, _REPLAYING):
        inputs = [each for each, _ in node.next_functions if each is not None]
        node = inputs[0] if len(inputs) == 1 or node.name() == _REPLAYING else None
    return not loss.requires_grad or (node is not None and node.name().startswith("NllLoss"))
