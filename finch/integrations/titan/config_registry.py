"""Configs for `torchtitan.train --module finch.titan --config NAME`: the paper's knowledge task, TOFU, on full models.

Every field can be changed on the command line, such as --dataloader.data_files ROWS.jsonl --dataloader.format question_answer.
"""

from __future__ import annotations

import dataclasses

from finch.base.errors import report_user_errors
from finch.integrations.titan import check_version

report_user_errors(check_version)()  # before the imports that another version may not have

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models import llama3, qwen3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from finch.integrations.titan.dataloader import TOFU, RowsDataLoader
from finch.integrations.titan.trainer import FinchTrainer, to_finch_config


def finch_sft_llama3_8b() -> FinchTrainer.Config:
    """Llama-3-8B, whose rotary frequencies are not scaled."""
    spec = llama3.model_registry("8B")
    for layer in spec.model.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, scaling="none")
    return _sft(spec, "./assets/hf/Meta-Llama-3-8B")


def finch_sft_llama3_1_8b() -> FinchTrainer.Config:
    """Llama-3.1-8B."""
    return _sft(llama3.model_registry("8B"), "./assets/hf/Llama-3.1-8B")


def finch_sft_qwen3_4b() -> FinchTrainer.Config:
    """Qwen3-4B."""
    return _sft(qwen3.model_registry("4B"), "./assets/hf/Qwen3-4B")


def finch_sft_qwen3_8b() -> FinchTrainer.Config:
    """Qwen3-8B."""
    return _sft(qwen3.model_registry("8B"), "./assets/hf/Qwen3-8B")


def _sft(spec: ModelSpec, assets: str) -> FinchTrainer.Config:
    """TOFU's question-answer pairs, about 15 in the 8 packs of an optimizer step on 8 ranks, 5 epochs, with the paper's rates.

    3,600 rows of 83 tokens in the mean and 163 at most (SmolLM2's tokenizer) make 1,910 packs of 192 tokens, 82% full; padded to 512, of
    what the ranks compute 16% would be rows.
    """
    rows = RowsDataLoader.Config(source=TOFU, name="full", part="train")
    config = Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))),
        hf_assets_path=assets,
        model_spec=spec,
        optimizer=default_adamw(lr=2e-5, betas=(0.9, 0.999), weight_decay=0.0),  # eta_base
        training=TrainingConfig(local_batch_size=1, seq_len=192, steps=1195, disable_cuda_graphs=True),
        dataloader=rows,
        metrics=MetricsProcessor.Config(log_freq=1),
        # The backend that torch 2.13 runs.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=239, initial_load_in_hf=True, last_save_in_hf=True, export_dtype="bfloat16"
        ),
        activation_checkpoint=SelectiveAC.Config(),
        validator=Validator.Config(
            enable=True, freq=239, dataloader=dataclasses.replace(rows, part="validation", is_shuffled=False)
        ),
    )
    return to_finch_config(config, eta_max=5e-5, init="dataset")
