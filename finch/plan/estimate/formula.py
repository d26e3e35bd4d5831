"""The memory of a step by a formula, which needs no fake step; what both estimates are given, and the parts that they name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from omegaconf import DictConfig
from torch import nn
from torchtune.modules import TransformerDecoder

from finch.base.errors import UserError
from finch.config.schema import SelfReplay
from finch.data.dataset import Samples
from finch.data.stats import DatasetStats
from finch.distributed.fsdp import layer_groups
from finch.distributed.precision import precision_of
from finch.objectives.replay import rows_in_step
from finch.training.chunked_loss import chunks_for
from finch.training.kl_penalty import build_kl, needs_reference
from finch.training.optimizer import optimizer_bytes
from finch.training.step_loss import build_objective

WEIGHTS, REFERENCE, BUFFERS = "weights", "reference model", "rotary tables"
GRADIENTS, OPTIMIZER, PENALTY = "gradients", "optimizer states", "weights that the regularizer keeps"
GATHERED, REDUCED = "gathered layers", "gradients to be reduced"
ACTIVATIONS, LOGITS, RECOMPUTED = "activations", "logits and loss", "recomputed activations"
BACKWARD, OTHER = "gradients inside the backward", "temporary tensors"
HOST_PARTS = (WEIGHTS, REFERENCE, GRADIENTS, OPTIMIZER, PENALTY)
"""What ``fsdp_cpu_offload`` keeps in host memory."""

TOFU_TOKENS, TOFU_TARGETS = 85, 37
"""Mean tokens and target tokens of a TOFU row with SmolLM2's chat template."""


@dataclass(frozen=True)
class Rows:
    """
    Attributes:
        seq: tokens of each row.
        targets: target tokens of each row, its last ones.
    """

    seq: int = TOFU_TOKENS
    targets: int = TOFU_TARGETS


def longest_row(samples: Samples, stats: DatasetStats) -> Rows:
    """The longest of a dataset's rows, with the mean share of targets; of packed rows a pack. Raises UserError if no row is good."""
    if not stats.num_rows:
        raise UserError(f"no row of {samples.source} can be used: fix the rows that `finch check` names")
    seq = len(samples[0]["tokens"]) if samples.packed else stats.max_length
    return Rows(seq, max(1, round(seq * stats.num_targets / sum(stats.lengths))))


def replayed_rows(cfg: DictConfig, ranks: int) -> tuple[int, int]:
    """How many replayed rows a micro-batch has at most where ``ranks`` share the data, and the tokens of the longest answer; its prompt
    is counted with as many. (0, 0) without self-replay."""
    settings = SelfReplay.of(cfg.self_replay)
    if settings is None:
        return 0, 0
    micro_batches = ranks * cfg.gradient_accumulation_steps
    return -(-rows_in_step(settings.share, cfg.batch_size * micro_batches) // micro_batches), settings.max_new_tokens


def memory_by_formula(decoder: TransformerDecoder, cfg: DictConfig, rows: Rows, *, ranks: int) -> Mapping[str, int]:
    """Bytes of each part of a rank, and ``"peak"``: the most on the device.

    Counted are weights, gradients and optimizer states over the ranks that share them. With FSDP2 what is not sharded for a moment: two
    groups of layers, the root's group (embedding, output, norm), and the gradients of one group and of the root. For each layer the inputs and
    outputs of its matrices and norms; where activations are recomputed only its input, and all of one layer. Selective checkpointing
    counts as none. The embedding's gradient twice, before it is added up. For each logit of a chunk 12 bytes, with a KL divergence 24.

    Args:
        decoder: on the meta device, in the dtype of the weights; parameters that are not trained require no gradient.
        cfg: a recipe's config.
        rows: of the largest micro-batch.
        ranks: on all nodes.
    """
    precision, kl = precision_of(cfg.dtype), build_kl(cfg)
    shards = max(1, ranks // cfg.data_parallel_replicate_dim)
    weight_bytes, compute_bytes = precision.weights.itemsize, precision.compute.itemsize
    embedding, layer = decoder.tok_embeddings.weight, decoder.layers[0]
    (count, trained), (in_layer, trained_in_layer) = _sizes(decoder), _sizes(layer)
    root = count - len(decoder.layers) * in_layer
    trained_root = trained - len(decoder.layers) * trained_in_layer
    num_models = 2 if needs_reference(kl, decoder) else 1
    weights = (count * num_models + (trained if cfg.regularizer is not None else 0)) * weight_bytes // shards
    states = int(trained * optimizer_bytes(cfg, precision)) // shards
    held = max(trained_in_layer, trained_root) if cfg.optimizer_in_bwd else trained
    gradients = held * weight_bytes // shards
    gathered = 0
    if ranks > 1 or precision.is_mixed or cfg.fsdp_cpu_offload:
        size = len(layer_groups(decoder.layers, in_layer * compute_bytes, cfg.fsdp_layers_per_group)[0])
        held = min(2 * size * in_layer, count - root) if cfg.fsdp_reshard_after_forward else (count - root) * num_models
        gathered = (held + root * num_models + size * trained_in_layer + trained_root) * compute_bytes
        if cfg.gradient_accumulation_steps > 1 and not cfg.fsdp_reduce_every_micro_batch:
            gathered += trained * weight_bytes
    replayed, answer = replayed_rows(cfg, max(1, ranks // cfg.tensor_parallel_dim))
    tokens = cfg.batch_size * rows.seq + 2 * answer * replayed
    hidden = tokens * embedding.shape[1] * compute_bytes
    # A matrix has two widths, and a norm's weight one dimension for both. Only a trained matrix needs its input.
    widths = [
        sum(weight.shape) * (3 - weight.dim()) if weight.requires_grad or weight.dim() == 1 else weight.shape[0]
        for weight in layer.parameters()
    ]
    recomputed, activations = 0, tokens * sum(widths) * compute_bytes
    if cfg.ac_mode == "full" or (cfg.enable_activation_checkpointing and cfg.ac_mode is None):
        recomputed = activations
        activations = 0 if cfg.enable_activation_offloading else hidden
    activations = activations * len(decoder.layers) + 2 * hidden
    targets = cfg.batch_size * rows.targets
    num_chunks = build_objective(cfg)[1]
    chunks = chunks_for(targets, embedding.shape[0], num_chunks, has_kl=kl is not None)
    logits = (12 if kl is None else 24) * embedding.shape[0] * -(-targets // chunks)
    chunks = chunks_for(answer * replayed, embedding.shape[0], num_chunks, has_kl=True)
    logits += 24 * embedding.shape[0] * -(-answer * replayed // chunks)
    backward = 2 * embedding.numel() * compute_bytes * embedding.requires_grad
    peak = gathered + activations + max(logits, recomputed)
    if not cfg.fsdp_cpu_offload:
        # Activations make room for gradients during the backward.
        moving = activations + max(logits, recomputed), gradients + backward
        is_accumulated = cfg.gradient_accumulation_steps > 1
        peak = weights + states + gathered + (sum(moving) if is_accumulated else max(moving))
    parts = {WEIGHTS: weights, GRADIENTS: gradients, OPTIMIZER: states, GATHERED: gathered}
    parts |= {ACTIVATIONS: activations, RECOMPUTED: recomputed, LOGITS: logits}
    return {**parts, BACKWARD: backward, "peak": peak}


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Parameters, and trained ones."""
    sizes = [(weight.numel(), weight.numel() * weight.requires_grad) for weight in module.parameters()]
    return sum(size for size, _ in sizes), sum(size for _, size in sizes)
