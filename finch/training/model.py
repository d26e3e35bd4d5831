"""The model of a run: the decoder on the meta device, then parallelized and in memory, then with the pretrained weights."""

from __future__ import annotations

import copy
import functools
import os
import time
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from omegaconf import DictConfig
from torch import nn
from torchtune import modules, training
from torchtune.models.llama3_1._position_embeddings import Llama3ScaledRoPE
from torchtune.modules import RotaryPositionalEmbeddings
from torchtune.training.activations import apply_selective_activation_checkpointing

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.instantiate import build, component_of, did_you_mean
from finch.data.stats import DatasetStats
from finch.distributed import fsdp, watchdog
from finch.distributed.parallel import Parallel
from finch.distributed.precision import Precision
from finch.distributed.tensor_parallel import Plan, apply_plan, build_plan
from finch.models.families import replace_known_bad_builder
from finch.models.hf_config import CONFIG
from finch.training.chunked_loss import TokenLoss
from finch.training.config_checks import check_text_decoder
from finch.training.padding_free_attention import DESCRIPTIONS, accept_padding_free, choose_way
from finch.weights.formats import open_checkpoint
from finch.weights.huggingface import PretrainedFolder

_MAX_LAYERS = 10_000
_ROTATES_PAIRS = (RotaryPositionalEmbeddings.forward, Llama3ScaledRoPE.forward)  # the others rotate halves


def build_decoder(
    cfg: DictConfig, precision: Precision
) -> tuple[modules.TransformerDecoder, PretrainedFolder, Plan | None]:
    """The decoder on the meta device, the folder of its pretrained weights, and the tensor-parallel plan if there is one.

    All are checked against each other; no weight is read. Raises UserError for a model that is no text decoder or not the folder's, and
    for layers that do not exist.
    """
    decoder, plan, component = decoder_on_meta(cfg, precision)
    base = open_checkpoint(cfg.checkpointer)
    base.check_model(decoder, component)
    return decoder, base, plan


def check_rows(
    decoder: modules.TransformerDecoder, base: PretrainedFolder, tokenizer: Any, key: str, stats: DatasetStats | None
) -> str | None:
    """A warning where the rows of a config key are longer than the window that the pretrained model attends to, or may be; see ``Fit``.

    Raises UserError for a token that the model has no embedding of.
    """
    number = decoder.tok_embeddings.num_embeddings
    if stats is not None and stats.max_token >= number:
        names = {each: f", {text!r}," for text, each in getattr(tokenizer, "special_tokens", {}).items()}
        raise UserError(
            f"{key}: the rows have the token {stats.max_token}{names.get(stats.max_token, '')} and the model has {number} embeddings, from 0 on; "
            "give the tokenizer of this model"
        )
    window, longest = base.window, decoder.max_seq_len if stats is None else stats.max_length
    if window is None or longest <= window:
        return None
    rows = "rows" if stats is None else f"{sum(each > window for each in stats.lengths):,} of {stats.num_rows:,} rows"
    return (
        f"{key}: {rows} longer than sliding_window={window} in {CONFIG} of {base.folder} are trained with more context than the pretrained model "
        f"has, since finch's model has no window; tokenizer.max_seq_len={window} cuts them there"
    )


def decoder_on_meta(cfg: DictConfig, precision: Precision) -> tuple[modules.TransformerDecoder, Plan | None, str]:
    """The decoder on the meta device, the tensor-parallel plan if there is one, and the builder's name. Reads no file.

    Raises UserError for a model that is no text decoder, and for layers that do not exist.
    """
    node, message = replace_known_bad_builder(cfg.model)
    if message is not None:
        logger.warning(message)
    layers = node.get("num_layers", 1)
    if type(layers) is not int or not 1 <= layers <= _MAX_LAYERS:  # each takes time, on the meta device as well
        raise UserError(f"model.num_layers={layers} must be a whole number from 1 to {_MAX_LAYERS:,}; correct it")
    with training.set_default_dtype(precision.weights), torch.device("meta"):
        decoder = build(node, "model")
    component = component_of(node) or ""
    check_text_decoder(decoder, component)
    plan = None
    if cfg.tensor_parallel_dim > 1:
        plan = build_plan(cfg.tensor_parallel_plan, decoder, cfg.tensor_parallel_dim)
    _check_custom_layers(decoder, cfg.custom_sharded_layers or [])
    return decoder, plan, component


def _check_custom_layers(decoder: nn.Module, names: Iterable[str]) -> None:
    """Checks that the model has the layers of ``custom_sharded_layers``."""
    known = {name for name, _ in decoder.named_modules()} | {"output"}
    for name in names:
        if name not in known:
            raise UserError(
                f"custom_sharded_layers names {name}, which the model does not have{did_you_mean(name, known)}"
            )


def parallelize(
    decoder: modules.TransformerDecoder,
    cfg: DictConfig,
    parallel: Parallel,
    precision: Precision,
    *,
    num_chunks: int,
    plan: Plan | None,
    has_reference: bool = False,
    device: torch.device | None = None,
) -> TokenLoss:
    """Applies tensor parallelism, activation checkpointing, compile and FSDP2, in this order; all stays on the meta device.

    ``has_reference`` adds a second, frozen copy of the decoder, sharded in the same way. ``device``: that the attention is chosen for;
    None: the ranks'.
    """
    # Before forwards are replaced: a copied closure would still call the first decoder's layers.
    reference = copy.deepcopy(decoder).requires_grad_(False) if has_reference else None
    model = TokenLoss(decoder, num_chunks, reference)
    decoders = [decoder] if reference is None else [decoder, reference]
    options = {"padding_free": cfg.padding_free, "compile": cfg.compile}
    model.way = choose_way(decoder, device or parallel.device, precision.compute, **options)
    logger.info(f"attention: {DESCRIPTIONS[model.way]}")
    torch.set_float32_matmul_precision(cfg.float32_matmul_precision)
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new length, and keeps all
    for each in decoders:
        if model.way != "padded":
            accept_padding_free(each, model.way)
        if parallel.tensor_mesh is not None and plan is not None:
            apply_plan(each, plan, parallel.tensor_mesh)  # before layers are wrapped: a plan matches module names
        if not cfg.compile:  # inductor fuses both, and has no complex products
            use_complex_product(each)
            use_fused_norm(each)
    # Of the trained decoder only: the reference has no backward that would recompute anything.
    if cfg.ac_mode is not None:
        apply_selective_activation_checkpointing(decoder, cfg.ac_mode, cfg.ac_option)
    elif cfg.enable_activation_checkpointing:
        training.set_activation_checkpointing(decoder, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
    if cfg.compile:
        compile_layers(decoders)
        model.cross_entropy = torch.compile(model.cross_entropy, backend=_backend())
    # The output layer is used inside the root's forward, and so is an embedding tied to it: both stay in the root's group.
    in_root = {"output", "tok_embeddings"} if isinstance(decoder.output, modules.TiedLinear) else {"output"}
    custom_layers = [name for name in cfg.custom_sharded_layers or [] if name not in in_root]
    fsdp.shard_model(
        model,
        [layer for each in decoders for layer in (*each.layers, *map(each.get_submodule, custom_layers))],
        parallel,
        mixed_precision=precision.policy(reduce_in_fp32=cfg.fsdp_reduce_in_fp32),
        offload=cfg.fsdp_cpu_offload,
        reshard_after_forward=cfg.fsdp_reshard_after_forward,
        pin_memory=not cfg.optimizer_in_bwd,
    )
    for each in decoders:
        fsdp.prefetch(each.layers)
    model.offloading = training.get_act_offloading_ctx_manager(decoder, cfg.enable_activation_offloading)
    return model


def compile_layers(decoders: Iterable[modules.TransformerDecoder]) -> None:
    """Compiles each layer, with the activation checkpointing that wraps it."""
    for layer in (layer for decoder in decoders for layer in decoder.layers):
        layer.compile(backend=_backend())


def _backend() -> str:
    return os.environ.get("TORCH_COMPILE_BACKEND", "inductor")  # torchtune's switch


def use_complex_product(decoder: modules.TransformerDecoder) -> None:
    """Lets torchtune's rotary embeddings of neighbouring dimensions call :func:`rotate_pairs`, one complex product; others stay as they are.

    torchtune computes real and imaginary parts in eight products of tensors with stride 2, and as many again in the backward.
    """
    for module in decoder.modules():
        if type(module).forward in _ROTATES_PAIRS:
            module.forward = functools.partial(rotate_pairs, module)


def use_fused_norm(decoder: modules.TransformerDecoder) -> None:
    """Lets torchtune's RMS norms keep 16-bit inputs: their conversion to fp32 keeps torch from its fused kernel, which computes in fp32 too."""
    for module in decoder.modules():
        if type(module) is modules.RMSNorm:
            module.forward = functools.partial(_norm, module)


def _norm(norm: modules.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    if keeps_fused_norm(norm, x):
        return F.rms_norm(x, norm.normalized_shape, norm.scale, norm.eps)
    return type(norm).forward(norm, x)


def keeps_fused_norm(norm: modules.RMSNorm, x: torch.Tensor) -> bool:
    """Whether torch's fused kernel takes a layer's input as it is."""
    return x.dtype == norm.scale.dtype and x.dtype.itemsize == 2


def rotate_pairs(rotary: nn.Module, x: torch.Tensor, *, input_pos: torch.Tensor | None = None) -> torch.Tensor:
    """What ``rotary(x, input_pos=input_pos)`` returns, computed in fp32 as there, but in fp64 for an fp64 model.

    The product's last bit depends on where in the tensor an element lies: vectors and what is left over round differently.

    ``rotary.cache`` holds cosine and sine, [positions, head_dim / 2, 2]; ``x`` and the result are [batch, seq, heads, head_dim];
    ``input_pos``: [batch, seq] position of each token in its own sample; None: 0 to seq - 1.
    """
    cache: torch.Tensor = rotary.get_buffer("cache")
    used = cache[None, : x.shape[1]] if input_pos is None else cache[input_pos]
    rotations = torch.view_as_complex(used.float()).unsqueeze(2)  # [batch, seq, 1, head_dim / 2]
    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotations).flatten(-2).type_as(x)


def allocate(model: TokenLoss, cfg: DictConfig, parallel: Parallel, precision: Precision) -> None:
    """Allocates memory. Buffers are filled, parameters are not: see :func:`load_pretrained`."""
    model.to_empty(device="cpu" if cfg.fsdp_cpu_offload else parallel.device)
    # Offloading moves parameters alone: buffers are read where the layers compute.
    with training.set_default_dtype(precision.weights), parallel.device:
        rotary: list[Any] = [module for module in model.modules() if hasattr(module, "rope_init")]
        for module in rotary:
            module.rope_init()  # not in state dicts


def load_pretrained(model: TokenLoss, base: PretrainedFolder) -> None:
    """Loads the pretrained weights; every rank reads its own shards, and those of the reference."""
    start = time.perf_counter()
    decoders = [model.decoder] if model.reference is None else [model.decoder, model.reference]
    base.load_into([decoder.state_dict(keep_vars=True) for decoder in decoders])
    watchdog.heartbeat()
    size = sum(parameter.numel() for parameter in model.decoder.parameters())
    logger.info(f"pretrained model of {size:,} parameters loaded in {time.perf_counter() - start:.1f} s")
