"""Config functions of small models for TorchTitan on a CPU: `--module helpers.titan_configs --config NAME`."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.config_utils import make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.llama3.parallelize import parallelize_llama
from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

INIT = {"weight": partial(nn.init.normal_, std=0.02)}


def llama(folder: Path) -> ModelSpec:
    """The Llama of a Hugging Face folder, with plain causal attention: rows are padded, never packed."""
    settings = json.loads((folder / "config.json").read_text())
    dim, heads, vocab = settings["hidden_size"], settings["num_attention_heads"], settings["vocab_size"]

    def norm() -> RMSNorm.Config:  # one each: TorchTitan writes each module's sharding into its config
        return RMSNorm.Config(normalized_shape=dim, eps=settings["rms_norm_eps"], param_init={"weight": nn.init.ones_})

    rope = ComplexRoPE.Config(dim=dim // heads, max_seq_len=512, theta=settings.get("rope_theta", 1e4), scaling="none")
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=make_gqa_config(
                dim=dim,
                n_heads=heads,
                n_kv_heads=settings["num_key_value_heads"],
                wqkv_param_init=INIT,
                wo_param_init=INIT,
                inner_attention=ScaledDotProductAttention.Config(),
                fuse_qkv=True,
                rope=rope,
            ),
            feed_forward=make_ffn_config(
                dim=dim, hidden_dim=settings["intermediate_size"], w1_param_init=INIT, w2w3_param_init=INIT
            ),
        )
        for _ in range(settings["num_hidden_layers"])
    ]
    model = Llama3Model.Config(
        dim=dim,
        vocab_size=vocab,
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=INIT),
        norm=norm(),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=INIT),
        layers=layers,
    )
    return ModelSpec("llama3", "test", model, parallelize_llama, pipeline_llm, None, Llama3StateDictAdapter)


def plain() -> Trainer.Config:
    """TorchTitan's own run of the folder FINCH_TEST_BASE on the rows FINCH_TEST_ROWS, in fp32."""
    from finch.integrations.titan.dataloader import RowsDataLoader

    base = Path(os.environ["FINCH_TEST_BASE"])
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config()),
        hf_assets_path=str(base),
        model_spec=llama(base),
        optimizer=default_adamw(lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0),
        training=TrainingConfig(
            local_batch_size=4, seq_len=128, steps=12, mixed_precision_param="float32", disable_cuda_graphs=True
        ),
        dataloader=RowsDataLoader.Config(data_files=os.environ["FINCH_TEST_ROWS"], split="train[:32]", is_packed=False),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=1000, initial_load_in_hf=True, last_save_model_only=False
        ),
        activation_checkpoint=None,
    )


def finch() -> Trainer.Config:
    """The same with FINCH."""
    from finch.integrations.titan import to_finch_config

    return to_finch_config(plain(), eta_max=2.5e-3, init="first_batch")


def dft() -> Trainer.Config:
    """FINCH with the objective DFT."""
    return _with_objective("DFT")


def eaft() -> Trainer.Config:
    return _with_objective("EAFT")


def talr() -> Trainer.Config:
    return _with_objective("TALR", tau=2.0)


def _with_objective(name: str, **options: float) -> Trainer.Config:
    from finch.integrations.titan.losses import ObjectiveLoss

    config = finch()
    loss = ObjectiveLoss.Config(objective=name, **options)
    config.loss = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=loss)
    return config


def validated() -> Trainer.Config:
    """FINCH with a validation set, and Hugging Face weights at the end."""
    from finch.integrations.titan.dataloader import RowsDataLoader

    rows = RowsDataLoader.Config(
        data_files=os.environ["FINCH_TEST_ROWS"], split="train[64:73]", is_shuffled=False, is_packed=False
    )
    config = finch()
    config.validator = Validator.Config(enable=True, freq=2, dataloader=rows)
    config.checkpoint.last_save_in_hf = config.checkpoint.last_save_model_only = True
    return config


def preserving() -> Trainer.Config:
    """FINCH with self_replay, and a probe of each kind: rows as the recipe takes them, one a sequence."""
    from finch.integrations.titan import to_finch_config

    base, stories = plain(), str(Path(os.environ["FINCH_TEST_ROWS"]).parents[1] / "tinystories/stories.jsonl")
    config = to_finch_config(base, preserve=True, eta_max=2.5e-3, init="first_batch")
    config.self_replay |= {"rows": 10, "max_new_tokens": 12, "strength": 0.3}
    perturbed = os.environ["FINCH_TEST_ROWS"].replace("full", "forget10_perturbed")
    config.probes = {
        "own": {"kind": "self", "data_files": os.environ["FINCH_TEST_ROWS"], "rows": 5, "max_new_tokens": 10},
        "stories": {"kind": "text", "data_files": stories, "rows": 3},
        "choices": {"kind": "multiple_choice", "data_files": perturbed, "rows": 3},
    }
    config.probes_every_n_steps = 3
    return config


def stopping() -> Trainer.Config:
    """The same without replay, each token's logits at once, and a budget that ends the run at its third evaluation of the KL."""
    config = preserving()
    config.self_replay, config.loss = {}, CrossEntropyLoss.Config()
    config.forgetting_budget = {"probe": "own", "metric": "kl", "max_increase": 0.7, "action": "stop"}
    config.checkpoint.last_save_in_hf = config.checkpoint.last_save_model_only = True
    return config
