"""From a decoder on the meta device to the module a run trains: cut, compiled, checkpointed, sharded, in memory; weights come later."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
from omegaconf import DictConfig
from torch import nn
from torchtune import modules, training
from torchtune.training.activations import apply_selective_activation_checkpointing

from finch.config.registry import did_you_mean
from finch.distributed import fsdp
from finch.distributed.parallel import Parallel
from finch.distributed.precision import Precision
from finch.distributed.tensor_parallel import Plan, apply_plan
from finch.errors import UserError
from finch.training.token_loss import TokenLoss


def check_custom_layers(decoder: nn.Module, names: Iterable[str]) -> None:
    """
    Raises:
        UserError: ``custom_sharded_layers`` names what the model does not have.
    """
    known = {name for name, _ in decoder.named_modules()} | {"output"}
    for name in names:
        if name not in known:
            raise UserError(
                f"custom_sharded_layers names {name}, which the model does not have{did_you_mean(name, known)}"
            )


def shard(
    decoder: modules.TransformerDecoder,
    cfg: DictConfig,
    ranks: Parallel,
    precision: Precision,
    *,
    num_chunks: int,
    tensor_plan: Plan | None = None,
) -> TokenLoss:
    """Wraps, shards and materializes the decoder. Its buffers are filled, its parameters are not.

    Args:
        num_chunks: pieces in which logits are made.
        tensor_plan: how tensor parallelism cuts the decoder; None: not.
    """
    model = TokenLoss(decoder, num_chunks)
    if ranks.tensor_mesh is not None and tensor_plan is not None:
        apply_plan(decoder, tensor_plan, ranks.tensor_mesh)  # before layers are wrapped: it goes by names
    if cfg.compile:
        training.compile_model(decoder, verbose=ranks.is_rank_zero)
        backend = os.environ.get("TORCH_COMPILE_BACKEND", "inductor")  # torchtune's switch
        model.cross_entropy = torch.compile(model.cross_entropy, backend=backend)
    if cfg.ac_mode is not None:
        apply_selective_activation_checkpointing(decoder, cfg.ac_mode, cfg.ac_option)
    elif cfg.enable_activation_checkpointing:
        training.set_activation_checkpointing(decoder, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    layers: list[nn.Module] = list(decoder.layers)
    # The output layer is used inside the root's forward, and so is an embedding tied to it: both stay in the root's group.
    in_root = {"output", "tok_embeddings"} if isinstance(decoder.output, modules.TiedLinear) else {"output"}
    apart = [decoder.get_submodule(name) for name in cfg.custom_sharded_layers or [] if name not in in_root]
    fsdp.shard_model(
        model,
        [*layers, *apart],
        ranks,
        mixed_precision=precision.policy(),
        offload=cfg.fsdp_cpu_offload,
        reshard_after_forward=cfg.fsdp_reshard_after_forward,
        pin_memory=not cfg.optimizer_in_bwd,
    )
    model.to_empty(device="cpu" if cfg.fsdp_cpu_offload else ranks.device)
    with training.set_default_dtype(precision.weights), ranks.device:
        for module in decoder.modules():
            if hasattr(module, "rope_init"):
                module.rope_init()  # not in state dicts
    model.offloading = training.get_act_offloading_ctx_manager(decoder, cfg.enable_activation_offloading)
    return model
