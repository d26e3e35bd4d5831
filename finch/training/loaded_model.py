"""A config's model in memory: parallelized, sharded, with the pretrained weights, and written as a folder."""

from __future__ import annotations

import copy
import functools
import itertools
import platform
import time
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torchtune import modules, training
from torchtune.training.activations import apply_selective_activation_checkpointing

from finch.base.errors import UserError
from finch.base.files import gigabytes
from finch.base.log import logger
from finch.data.prompts import stop_tokens
from finch.data.stats import DatasetStats
from finch.distributed import fsdp, watchdog
from finch.distributed.parallel import Parallel
from finch.distributed.precision import Precision, precision_of
from finch.distributed.tensor_parallel import apply_plan
from finch.models import lora
from finch.models.hf_config import CONFIG
from finch.training.chunked_loss import TokenLoss
from finch.training.model import compile_backend, compile_layers, decoder_on_meta, use_fast_rotary, use_fused_norm
from finch.training.optimizer import optimizer_bytes
from finch.training.padding_free_attention import DESCRIPTIONS, accept_padding_free, choose_way
from finch.training.reference import fingerprint_of
from finch.weights.formats import open_checkpoint
from finch.weights.huggingface import PretrainedFolder
from finch.weights.peft import PeftFolder

_ADAPTER = "_adapter"


class LoadedModel:
    """A config's model, from the meta device to the folder it is exported to: for the recipes, the estimate, the GPU check, averages and chat.

    What is cheap and can fail comes first: the decoder on the meta device, whose shapes rows, losses and files are checked against. Then
    :meth:`parallelize` and :meth:`allocate` bring it into memory, and :meth:`load_pretrained` fills it.

    Args:
        cfg: a checked config.
        has_adapters: whether only LoRA's layers are trained.
        has_files: whether there is a pretrained folder; else no file is read.

    Attributes:
        decoder: torchtune's.
        base: the folder of its pretrained weights; only with ``has_files``.

    Raises:
        UserError: the model is no text decoder, not the folder's, or has no LoRA layers; layers do not exist; or PEFT's format cannot hold the adapter.
    """

    base: PretrainedFolder

    def __init__(
        self, cfg: DictConfig, precision: Precision, *, has_adapters: bool = False, has_files: bool = True
    ) -> None:
        if has_adapters:
            lora.check_lora_settings(cfg.model)
        self._cfg, self._precision, self._has_adapters = cfg, precision, has_adapters
        self.decoder, self._plan, component = decoder_on_meta(cfg, precision)
        if has_files:
            self.base = open_checkpoint(cfg.checkpointer)
            self.base.check_model(self.decoder, component)
        if has_adapters:
            lora.train_adapters_only(self.decoder, component)
        self._adapter = PeftFolder(self.decoder, self.base) if has_adapters and has_files else None

    def accept(self, tokenizer: Any) -> None:
        """Takes over what an exported folder says of the tokenizer; one whose padding has no embedding pads by its end token."""
        if (tokenizer.pad_id or 0) >= self.decoder.tok_embeddings.num_embeddings:
            tokenizer.pad_id = tokenizer.eos_id  # padding is looked up too, and then masked
        self.base.chat_template = getattr(tokenizer, "chat_template", None)  # torchtune's tokenizers have none
        self.base.stop_tokens = stop_tokens(tokenizer)

    def check_rows(self, tokenizer: Any, key: str, stats: DatasetStats | None) -> str | None:
        """A warning where the rows of a config key are longer than the window that the pretrained model attends to, or may be; see ``Fit``.

        Raises UserError for a token that the model has no embedding of, and rows that are longer than its context.
        """
        number, base = self.decoder.tok_embeddings.num_embeddings, self.base
        if stats is not None and stats.max_token >= number:
            names = {each: f", {text!r}," for text, each in getattr(tokenizer, "special_tokens", {}).items()}
            raise UserError(
                f"{key}: the rows have the token {stats.max_token}{names.get(stats.max_token, '')} and the model has {number} embeddings, from 0 on; "
                "give the tokenizer of this model"
            )
        context = self.decoder.max_seq_len
        if stats is not None and stats.max_length > context:
            rows = f"{sum(each > context for each in stats.lengths):,} of {stats.num_rows:,} rows"
            raise UserError(
                f"{key}: {rows} are longer than the {context} tokens of the model's context; tokenizer.max_seq_len={context} cuts them there"
            )
        window, longest = base.window, self.decoder.max_seq_len if stats is None else stats.max_length
        if window is None or longest <= window:
            return None
        rows = (
            "rows" if stats is None else f"{sum(each > window for each in stats.lengths):,} of {stats.num_rows:,} rows"
        )
        return (
            f"{key}: {rows} longer than sliding_window={window} in {CONFIG} of {base.folder} are trained with more context than the pretrained model "
            f"has, since finch's model has no window; tokenizer.max_seq_len={window} cuts them there"
        )

    @functools.cached_property
    def digest(self) -> str:
        """Of the pretrained weights."""
        return fingerprint_of(self.base.files, 0, {})

    def check_room(self, parallel: Parallel) -> None:
        """Raises UserError, on all ranks, if one has other pretrained weights, or a GPU less free memory than weights and optimizer states take
        there; a collective."""
        if parallel.world_size > 1:
            parallel.require_equal("pretrained weights", self.digest)
        if self._cfg.fsdp_cpu_offload:
            return
        weights, bytes_of = list(self.decoder.parameters()), optimizer_bytes(self._cfg, self._precision)
        needed = sum(each.nbytes + bytes_of * each.numel() * each.requires_grad for each in weights)
        needed /= parallel.world_size // self._cfg.data_parallel_replicate_dim
        place = f"GPU {parallel.device.index} of {platform.node()}"
        for name, free in parallel.gather_all_ranks((place, fsdp.free_memory(parallel.device))):
            if free is not None and free < needed:
                raise UserError(
                    f"device={self._cfg.device}: {name} has {gigabytes(free)} free, weights and optimizer states need {gigabytes(int(needed))} there; end what "
                    "else runs on it (nvidia-smi), choose others with CUDA_VISIBLE_DEVICES, or start more ranks"
                )

    def in_memory(self, parallel: Parallel, *, num_chunks: int = 1, has_reference: bool = False) -> TokenLoss:
        """The model, sharded and allocated; its parameters have no values yet."""
        model = self.parallelize(parallel, num_chunks=num_chunks, has_reference=has_reference)
        self.allocate()
        return model

    def parallelize(
        self,
        parallel: Parallel,
        *,
        num_chunks: int = 1,
        has_reference: bool = False,
        device: torch.device | None = None,
    ) -> TokenLoss:
        """Applies tensor parallelism, activation checkpointing, compile and FSDP2, in this order; all stays on the meta device.

        ``has_reference`` adds a second, frozen copy of the decoder, sharded in the same way. ``device``: that the attention is chosen for;
        None: the ranks'.
        """
        cfg, decoder = self._cfg, self.decoder
        # Before forwards are replaced: a copied closure would still call the first decoder's layers.
        reference = copy.deepcopy(decoder).requires_grad_(False) if has_reference else None
        self._model, self._parallel = TokenLoss(decoder, num_chunks, reference), parallel
        model, decoders = self._model, [decoder] if reference is None else [decoder, reference]
        options = {"padding_free": cfg.padding_free, "compile": cfg.compile}
        model.way = choose_way(decoder, device or parallel.device, self._precision.compute, **options)
        logger.info(f"attention: {DESCRIPTIONS[model.way]}")
        torch.set_float32_matmul_precision(cfg.float32_matmul_precision)
        torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for each new length, and keeps all
        for each in decoders:
            if model.way != "padded":
                accept_padding_free(each, model.way)
            if parallel.tensor_mesh is not None and self._plan is not None:
                # Before layers are wrapped: a plan matches module names.
                apply_plan(each, self._plan, parallel.tensor_mesh)
            if not cfg.compile:  # inductor fuses both, and has no complex products
                use_fast_rotary(each)
                use_fused_norm(each)
        # Of the trained decoder only: the reference has no backward that would recompute anything.
        if cfg.ac_mode is not None:
            apply_selective_activation_checkpointing(decoder, cfg.ac_mode, cfg.ac_option)
        elif cfg.enable_activation_checkpointing:
            training.set_activation_checkpointing(decoder, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
        if cfg.compile:
            compile_layers(decoders)
            model.cross_entropy = torch.compile(model.cross_entropy, backend=compile_backend())
        # The output layer is used inside the root's forward, and so is an embedding tied to it: both stay in the root's group.
        in_root = {"output", "tok_embeddings"} if isinstance(decoder.output, modules.TiedLinear) else {"output"}
        custom_layers = [name for name in cfg.custom_sharded_layers or [] if name not in in_root]
        nbytes = self._precision.compute.itemsize * sum(weight.numel() for weight in decoder.layers[0].parameters())
        groups = [fsdp.layer_groups(each.layers, nbytes, cfg.fsdp_layers_per_group) for each in decoders]
        custom = [[each.get_submodule(name)] for each in decoders for name in custom_layers]
        fsdp.shard_model(
            model,
            [*itertools.chain(*groups), *custom],
            parallel,
            mixed_precision=self._precision.policy(reduce_in_fp32=cfg.fsdp_reduce_in_fp32),
            offload=cfg.fsdp_cpu_offload,
            reshard_after_forward=cfg.fsdp_reshard_after_forward,
            pin_memory=not cfg.optimizer_in_bwd,
        )
        for each in groups:
            fsdp.prefetch(each)
        model.offloading = training.get_act_offloading_ctx_manager(decoder, cfg.enable_activation_offloading)
        return model

    def allocate(self) -> None:
        """Allocates memory. Buffers are filled, parameters are not."""
        device = self._parallel.device
        self._model.to_empty(device="cpu" if self._cfg.fsdp_cpu_offload else device)
        # Offloading moves parameters alone: buffers are read where the layers compute.
        with training.set_default_dtype(self._precision.weights), device:
            rotary: list[Any] = [module for module in self._model.modules() if hasattr(module, "rope_init")]
            for module in rotary:
                module.rope_init()  # not in state dicts

    def load_pretrained(self, seed: int) -> None:
        """Loads the pretrained weights, of which every rank reads its own shards, into the reference too; adapters get their initial values by
        ``seed``, the same on all ranks."""
        start = time.perf_counter()
        decoders = [self.decoder] if self._model.reference is None else [self.decoder, self._model.reference]
        self.base.load_into([decoder.state_dict(keep_vars=True) for decoder in decoders])
        if self._has_adapters:
            # After the base weights, whose rows' norms DoRA starts from.
            lora.initialize_adapters(self.decoder, seed)
        watchdog.heartbeat()
        size = sum(parameter.numel() for parameter in self.decoder.parameters())
        logger.info(f"pretrained model of {size:,} parameters loaded in {time.perf_counter() - start:.1f} s")

    def exported(self, name: str) -> str:
        """The name of the folder of the complete model that :meth:`write` makes; of the adapter's, where it writes no other."""
        return f"{name}{_ADAPTER}" if self._adapter is not None and self._cfg.save_adapter_weights_only else name

    def write(self, folder: Path) -> None:
        """Writes a Hugging Face folder in ``export_dtype``, and ``folder``_adapter in PEFT's format; a collective.

        Raises WriteFailed on the rank that writes, after all ranks have gathered.
        """
        dtype = None if self._cfg.export_dtype is None else precision_of(self._cfg.export_dtype).weights
        options: dict[str, Any] = {"is_writer": self._parallel.is_rank_zero, "dtype": dtype}
        if self._adapter is None:
            self.base.write(self.decoder.state_dict().items(), folder, **options)
            return
        try:
            self._adapter.write(self.decoder, folder.with_name(f"{folder.name}{_ADAPTER}"), **options)
        finally:  # where the disk of the one rank that writes is full as well: the others send it their shards
            if not self._cfg.save_adapter_weights_only:
                adapters = lora.adapter_parameters(self.decoder)
                like = {key: tensor for key, tensor in self.decoder.state_dict().items() if key not in adapters}
                self.base.write(lora.merged(self.decoder, dtype), folder, **options, like=like)
