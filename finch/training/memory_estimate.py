"""An estimate of the peak memory of a training step, by part, only from shapes: no weight is allocated."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torchtune.modules import TransformerDecoder

from finch.config.instantiate import build
from finch.distributed.precision import Precision, precision_of
from finch.optim.optimizers import stochastic_optimizer
from finch.training.chunked_loss import chunks_for
from finch.training.kl_penalty import build_kl, needs_reference

_SAMPLE_SIZE = 4096  # elements of the parameter that an optimizer's states are counted on
_BLOCK = 256  # elements that share one fp32 scale in the 8-bit optimizers of torchao and bitsandbytes; 4-bit: 128


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a rank.

    Attributes:
        batch, seq: its shape; all samples are padded to ``seq`` tokens.
        targets: target tokens, the only ones at which logits are computed.
        num_chunks: in how many chunks logits are computed where they are many, see ``finch.training.chunked_loss.chunks_for``.
    """

    batch: int
    seq: int
    targets: int
    num_chunks: int = 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per rank. P: parameters, T: trained ones, N: ranks that share them, w and c: bytes per element of ``dtype``'s weights and
    of its computation.

    Attributes:
        weights: P w / N; with a regularizer another T w / N, the copy that it pulls toward; with a KL penalty that runs a frozen copy
            of the model another P w / N.
        gathered: with FSDP2, what is not sharded for a moment: two layers (the second is prefetched) and the root's group (embedding,
            output, norm) in the compute dtype, and the gradients of one layer and of the root before they are reduced:
            (3 layer + 2 root) c, with a frozen copy one root more; all layers and the root with ``fsdp_reshard_after_forward: False``;
            T w more with gradient accumulation and ``fsdp_reduce_every_micro_batch: False``, the gradients before they are reduced.
        gradients: T w / N; with ``optimizer_in_bwd`` only those of the largest layer.
        optimizer: T x the bytes of state per parameter, counted on a small parameter (AdamW: 2 w; SGD: 0, with momentum w;
            bf16_stochastic: 8; 8-bit: 2 (1 + 4/256)) / N.
        logits: 12 x vocabulary x targets of the largest chunk: log-probabilities, their gradient and the logits' gradient in fp32. With a
            KL penalty 24 x: the two models' log-probabilities and the pretrained one's logits and probabilities as well.
        activations: what autograd saves in a layer for the backward, counted by running one layer on fake tensors, x layers; with
            activation checkpointing only a layer's input, batch x seq x width x c, x layers; and the last hidden state twice.
        recomputed: with activation checkpointing what one layer saves. The logits are freed before.
        is_accumulated: whether gradients of earlier micro-batches are there during a forward pass.
        is_offloaded: weights, gradients and optimizer states are in host memory.

    Compared with real runs in docs/verification.md. Not counted: the framework itself (a CUDA context: about 0.5 GB), temporary tensors
    inside an operation, fragmentation, the collectives' buffers, kernels' workspaces, data, and the host copy of an asynchronous checkpoint.
    """

    weights: int
    gathered: int
    gradients: int
    optimizer: int
    logits: int
    activations: int
    recomputed: int = 0
    is_accumulated: bool = False
    is_offloaded: bool = False

    @property
    def sharded(self) -> int:
        """Weights, gradients and optimizer states."""
        return self.weights + self.gradients + self.optimizer

    @property
    def peak(self) -> int:
        """On the device. During the backward activations make room for gradients: the larger of the two counts."""
        step = self.activations + max(self.logits, self.recomputed)
        if self.is_offloaded:
            return self.gathered + step
        moving = step + self.gradients if self.is_accumulated else max(step, self.gradients)
        return self.weights + self.gathered + self.optimizer + moving


def estimate_memory(
    decoder: TransformerDecoder, cfg: DictConfig, micro_batch: MicroBatch, *, shards: int, is_sharded: bool
) -> MemoryEstimate:
    """The estimate for one rank; see :class:`MemoryEstimate` for the formula of each part.

    Args:
        decoder: on the meta device, in the dtype of the weights; parameters that are not trained require no gradient.
        shards: ranks that one copy of the model is divided over, tensor parallelism included.
        is_sharded: whether FSDP2 is used.
    """
    precision = precision_of(cfg.dtype)
    weight_bytes, compute_bytes = precision.weights.itemsize, precision.compute.itemsize
    parameters = list(decoder.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in decoder.layers]
    trained_layers = [sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in decoder.layers]
    root, trained_root = count - sum(layers), trained - sum(trained_layers)
    kl = build_kl(cfg)
    num_models = 2 if needs_reference(kl, decoder) else 1
    gathered = 0
    if is_sharded:
        held = 2 * max(layers) if cfg.fsdp_reshard_after_forward else sum(layers) * num_models
        gathered = (held + root * num_models + max(trained_layers) + trained_root) * compute_bytes
        if cfg.gradient_accumulation_steps > 1 and not cfg.fsdp_reduce_every_micro_batch:
            gathered += trained * weight_bytes
    in_backward = max(*trained_layers, *(p.numel() for p in parameters if p.requires_grad))
    vocab_size = _vocabulary(decoder)
    num_chunks = chunks_for(micro_batch.targets, vocab_size, micro_batch.num_chunks, has_kl=kl is not None)
    activations, recomputed = _activations(decoder, cfg, micro_batch, precision.compute)
    return MemoryEstimate(
        weights=(count * num_models + (trained if cfg.regularizer is not None else 0)) * weight_bytes // shards,
        gathered=gathered,
        gradients=(in_backward if cfg.optimizer_in_bwd else trained) * weight_bytes // shards,
        optimizer=int(trained * optimizer_bytes(cfg, precision)) // shards,
        recomputed=recomputed,
        logits=(12 if kl is None else 24) * vocab_size * -(-micro_batch.targets // num_chunks),
        activations=activations,
        is_accumulated=cfg.gradient_accumulation_steps > 1,
        is_offloaded=cfg.fsdp_cpu_offload,
    )


def optimizer_bytes(cfg: DictConfig, precision: Precision) -> float:
    """Bytes of optimizer state per trained parameter: counted on a small parameter, by name for optimizers that compile a kernel."""
    node: dict[str, Any] = {**cfg.optimizer}
    if precision.stochastic:
        component, arguments = stochastic_optimizer(node.pop("_component_"), node)
        node = {"_component_": component, **arguments}
    module, _, name = node["_component_"].rpartition(".")
    for pattern, bits, block in (("8bit", 8, _BLOCK), ("fp8", 8, _BLOCK), ("4bit", 4, _BLOCK // 2)):
        if pattern in name.lower():
            return 2 * (bits / 8 + 4 / block)
    if module.startswith("torchao"):  # its Adam has two moments
        return 2 * (4 if precision.stochastic else precision.weights.itemsize)
    parameter = nn.Parameter(torch.zeros(_SAMPLE_SIZE, dtype=precision.weights))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = build(node, "optimizer", [parameter])
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor) and value.dim()]
    return sum(state.numel() * state.itemsize for state in states) / _SAMPLE_SIZE


def _activations(
    decoder: TransformerDecoder, cfg: DictConfig, micro_batch: MicroBatch, compute: torch.dtype
) -> tuple[int, int]:
    """Bytes that are kept until the backward, and those of one recomputed layer."""
    layers, width = len(decoder.layers), decoder.tok_embeddings.embedding_dim
    hidden = micro_batch.batch * micro_batch.seq * width * compute.itemsize
    layer = _saved_by_layer(decoder.layers[0], width, micro_batch, compute)
    if cfg.ac_mode == "selective":
        every = cfg.ac_option if isinstance(cfg.ac_option, int) else 0
        recomputed = layers // every if every else 0  # "op" keeps products: counted as if it kept all
    else:
        recomputed = layers if cfg.enable_activation_checkpointing or cfg.ac_mode == "full" else 0
    inputs = 0 if cfg.enable_activation_offloading else hidden * recomputed
    return layer * (layers - recomputed) + inputs + 2 * hidden, layer if recomputed else 0


def _saved_by_layer(layer: nn.Module, width: int, micro_batch: MicroBatch, compute: torch.dtype) -> int:
    """Bytes that a layer's forward saves for its backward, its weights not included."""
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    def on_cpu(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=dtype, device="cpu", requires_grad=tensor.requires_grad)

    layer = copy.deepcopy(layer)
    with torch.device("cpu"):
        rotary: list[Any] = [module for module in layer.modules() if hasattr(module, "rope_init")]
        for module in rotary:
            module.max_seq_len = micro_batch.seq
            module.rope_init()  # reads values, which fake tensors have not
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = {name: on_cpu(weight, compute) for name, weight in layer.named_parameters()}
        weights |= {name: on_cpu(buffer, buffer.dtype) for name, buffer in layer.named_buffers()}
        hidden = torch.empty(micro_batch.batch, micro_batch.seq, width, dtype=compute, device="cpu", requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = functional_call(layer, weights, (hidden,), {"mask": None})
        for weight in weights.values():
            saved.pop(weight.untyped_storage()._cdata, None)
        del output
        return sum(storage.nbytes() for storage in saved.values())


def _vocabulary(decoder: TransformerDecoder) -> int:
    return decoder.tok_embeddings.num_embeddings
