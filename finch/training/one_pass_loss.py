"""Loss and gradient in one pass over chunks of tokens: each chunk's logits are computed once and freed with it.

    total = scale * sum_t weight_t * loss_t + kl_scale * sum_t kl_t

Where a token's weight is known as soon as its loss is, the gradient with respect to the chunk's logits is known in the forward
pass, and with it the chunk's share of the gradients of hidden states and head. That takes 3 products with the head; keeping no
logits and recomputing them in the backward takes 4. Otherwise the losses of all chunks are computed first: 4 products as well.

The head's gradient is accumulated in one buffer of its weight's dtype, as by autograd: the only tensor of its size next to the
weight, which in fp32 would be twice as large for a bf16 head. The product adds to it before it rounds, once per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtune.modules import TiedLinear

from finch.training.readouts import Outputs, Readout, read


@dataclass(frozen=True)
class Weighting:
    """How a micro-batch's token losses, and its token KL, are summed to what is differentiated.

    Attributes:
        weights: from ``TokenLoss``'s outputs [batch, seq, ...], detached, to the factors of ``loss``, [batch, seq]. Called with every
            chunk where ``is_elementwise``; the outputs of later chunks are then 0. Otherwise called once.
        is_elementwise: whether a token's weight depends on the outputs for that token only.
        scale: [] of the weighted sum.
        kl_scale: [] of the sum of ``kl``; None: it is not differentiated.
    """

    weights: Callable[[Outputs], torch.Tensor]
    is_elementwise: bool
    scale: torch.Tensor
    kl_scale: torch.Tensor | None = None

    def total(self, weights: torch.Tensor, outputs: Outputs) -> torch.Tensor:
        """[] with its graph, from weights and outputs of the same shape."""
        total = (weights * outputs["loss"]).sum() * self.scale
        return total if self.kl_scale is None else total + outputs["kl"].sum() * self.kl_scale


class _LinearHead:
    """An output layer that is one product. Its weight's gradient, summed over the chunks, needs no second tensor of that size."""

    def __init__(self, output: Any, weight: torch.Tensor) -> None:
        self._output, self._weight = output, weight
        self.parameters = [weight] if weight.requires_grad else []
        self.gradients: list[torch.Tensor] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[tokens, vocab] from [tokens, embed], detached."""
        self._hidden = hidden
        return self._output(hidden)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """The hidden states' gradient [tokens, embed] from that of the last logits; adds to ``gradients``."""
        if self.parameters and not self.gradients:
            self.gradients = [gradient.T @ self._hidden]
        elif self.parameters:
            # Not addmm_, whose operations no counter knows.
            torch.addmm(self.gradients[0], gradient.T, self._hidden, out=self.gradients[0])
        return gradient @ self._weight


class _AnyHead:
    """An output layer of any kind, such as one with adapters or a soft cap; attributes and methods are those of ``_LinearHead``."""

    def __init__(self, output: Any, parameters: Sequence[torch.Tensor]) -> None:
        self._output = output
        self.parameters = [each for each in parameters if each.requires_grad]
        self.gradients: list[torch.Tensor] = []

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            self._logits = self._output(self._hidden)
        return self._logits.detach()

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        # Zeros for trained parameters that the head's forward does not use.
        own, *others = torch.autograd.grad(
            self._logits, [self._hidden, *self.parameters], gradient, materialize_grads=True
        )
        # Its graph would otherwise live beside the next chunk's.
        del self._logits
        if not self.gradients:
            self.gradients = others
        elif others:
            torch._foreach_add_(self.gradients, others)
        return own


Head = _LinearHead | _AnyHead


def head_of(output: Any, weighting: Weighting) -> Head | None:
    """A decoder's output layer as ``one_pass`` uses it; None where it cannot: sharded by tensor parallelism, or called twice with dropout."""
    if isinstance(output, TiedLinear):  # no module
        parameters = [output.tied_module.weight]
    elif isinstance(output, nn.Module):
        parameters = list(output.parameters())
    else:
        return None
    # FSDP2 has gathered the head's weights here: what is still a DTensor is cut by tensor parallelism.
    if any(isinstance(each, DTensor) for each in parameters):
        return None
    if type(output) in (TiedLinear, nn.Linear) and len(parameters) == 1:
        return _LinearHead(output, parameters[0])
    return _AnyHead(output, parameters) if weighting.is_elementwise else None


@torch.no_grad()
def one_pass(
    head: Head,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    readouts: Sequence[Readout],
    weighting: Weighting,
    *,
    positions: torch.Tensor,
    shape: torch.Size,
    num_chunks: int,
) -> Outputs:
    """
    Args:
        hidden: [tokens, embed] the head's input.
        labels: [tokens].
        readouts: at least one of ``loss``.
        positions: [tokens] int64, of the tokens in the flattened labels.
        shape: of the labels, [batch, seq].

    Returns:
        The outputs [batch, seq, ...], detached, 0 at other positions; and ``total`` [] with its graph.
    """
    outputs: Outputs = {}

    def record(new: Outputs, where: torch.Tensor) -> None:
        for name, values in new.items():
            if name not in outputs:
                outputs[name] = values.new_zeros(*shape, *values.shape[1:])
            outputs[name].flatten(0, 1).index_copy_(0, where, values.detach())

    inputs = (positions, hidden.detach(), labels, *(row for each in readouts for row in each.rows))
    chunks = list(zip(*(each.chunk(num_chunks) for each in inputs), strict=True))
    weights = None
    if not weighting.is_elementwise:
        # Without what needs the pretrained model: no weight depends on the KL, which the second pass computes.
        own = [each for each in readouts if not each.rows]
        for where, chunk, its_labels, *_ in chunks:
            record(read(own, head.logits(chunk), its_labels), where)
        weights = weighting.weights(outputs)
    total, gradients = torch.zeros((), dtype=torch.float64, device=hidden.device), []

    def logits_gradient(where: torch.Tensor, logits: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """A chunk's gradient; adds its share to ``total``. As a function it frees what it held before the products that follow."""
        logits.requires_grad_()
        with torch.enable_grad():
            new = read(readouts, logits, *inputs)
            # Before the weights: an elementwise objective reads this chunk's outputs at their places.
            record(new, where)
            known = weighting.weights(outputs) if weights is None else weights
            share = weighting.total(known.flatten().index_select(0, where), new)
        total.add_(share.detach())
        return torch.autograd.grad(share, logits)[0]

    for where, chunk, *rest in chunks:
        gradients.append(head.backward(logits_gradient(where, head.logits(chunk), *rest)))
    gradients = [torch.cat(gradients), *head.gradients]
    with torch.enable_grad():
        # The head's weights are inputs, so that their gradients arrive as any others do, at FSDP2's hooks as well.
        return {**outputs, "total": _WithGradients.apply(total, gradients, hidden, *head.parameters)}


class _WithGradients(torch.autograd.Function):
    """A number whose gradients with respect to ``inputs`` are already known; for one backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradients: list[torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # They are scaled in place. Given away, they make a second backward fail, which would scale them again.
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(gradient.mul_(grad_output) for gradient in gradients)
