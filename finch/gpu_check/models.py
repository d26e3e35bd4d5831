"""The models and rows of the check: no weights, no text, all from seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from torchtune.datasets import PackedDataset

from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys, LoraFinetuneKeys
from finch.distributed.precision import precision_of
from finch.gpu_check.report import Check
from finch.models.qwen3 import SIZE_0_6B, SIZE_1_7B, SIZE_4B
from finch.torchtune_names import labels_come_shifted
from finch.training.model import decoder_on_meta

Weights = dict[str, torch.Tensor]
Row = dict[str, list[int]]

TOKENS, TARGETS, PREFIX = (40, 130), 37, 27
"""A row as TOFU's: tokens between these, its last ones targets; what all rows begin with where they share a prefix."""
BATCH = 16
IGNORED = -100


@dataclass(frozen=True)
class Model:
    """A model by the arguments of its builder.

    Attributes:
        name: in lines of the report.
        component: the builder's dotted path.
        sizes: its arguments.
    """

    name: str
    component: str
    sizes: Mapping[str, Any]

    @property
    def block(self) -> dict[str, Any]:
        """The ``model`` block of a config."""
        return {"_component_": self.component, **self.sizes}

    @property
    def head_dim(self) -> int:
        return int(self.sizes.get("head_dim") or self.sizes["embed_dim"] // self.sizes["num_heads"])

    def products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of the linear layers of a layer."""
        sizes = self.sizes
        width, middle, heads = sizes["embed_dim"], sizes["intermediate_dim"], sizes["num_heads"] * self.head_dim
        kv = sizes["num_kv_heads"] * self.head_dim
        return [(width, heads), (width, kv), (width, kv), (heads, width), (width, middle), (width, middle), (middle, width)]  # fmt: skip


def _llama(name: str, **sizes: int) -> Model:
    return Model(name, "torchtune.models.llama3.llama3", {"max_seq_len": 8192, "norm_eps": 1e-5, "rope_base": 500_000, **sizes})  # fmt: skip


def _qwen3(name: str, sizes: Mapping[str, Any]) -> Model:
    return Model(name, "finch.models.qwen3.qwen3", {"max_seq_len": 8192, **sizes})


_TINY = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "embed_dim": 32, "intermediate_dim": 48, "vocab_size": 320}
_Q_SIZE = {**SIZE_0_6B, "num_layers": 8}
_GPU = {
    "S": _llama("S", vocab_size=32_000, num_layers=8, num_heads=8, num_kv_heads=4, embed_dim=512, intermediate_dim=1408),  # fmt: skip
    "Q": _qwen3("Q", _Q_SIZE),
}
_CPU = {
    "S": _llama("S (tiny)", **_TINY),
    "Q": _qwen3("Q (tiny)", {**_TINY, "head_dim": 16, "tie_word_embeddings": True}),
}
LARGE = (_qwen3("Qwen3-4B", SIZE_4B), _qwen3("Qwen3-1.7B", SIZE_1_7B), _qwen3("Qwen3-0.6B", SIZE_0_6B), _GPU["Q"])
"""B: the first of these that fits."""
_SMALL_B = _qwen3("B (tiny)", {**_TINY, "num_layers": 4, "embed_dim": 64, "intermediate_dim": 128, "head_dim": 16, "tie_word_embeddings": True})  # fmt: skip


def models(device: str) -> dict[str, Model]:
    """S (Llama) and Q (Qwen3, tied)."""
    return _CPU if device == "cpu" else _GPU


def large_models(device: str) -> tuple[Model, ...]:
    """Those of which B is the first that fits, the largest first."""
    return (_SMALL_B,) if device == "cpu" else LARGE


def random_weights(shapes: Mapping[str, torch.Tensor], seed: int = 0, device: str = "cpu") -> Weights:
    """Values for a decoder's state dict, fp32 on ``device``: large enough that attention, norms and positions matter."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, like in shapes.items():
        value = torch.empty(like.shape, device=device)
        if like.dim() > 1:
            value.normal_(std=like.shape[-1] ** -0.5, generator=generator)
        else:  # scales of 1 would hide a norm in the wrong place
            value.uniform_(0.5, 1.5, generator=generator)
        weights[name] = value
    return weights


def random_rows(vocab_size: int, number: int, *, prefix: int = 0, seed: int = 0) -> list[Row]:
    """Rows of unequal lengths: ``tokens``, and ``labels`` of the same positions, -100 before the targets. With ``prefix`` all begin alike."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(1, vocab_size, (length,), generator=generator).tolist()

    shared, rows = draw(prefix), []
    for index in range(number):
        length = int(torch.randint(*TOKENS, (), generator=generator))
        tokens = [*shared, *draw(length - prefix)]
        if not prefix:
            tokens[0] = index + 1  # no two begin alike
        targets = min(TARGETS, length - PREFIX - 1)
        rows.append({"tokens": tokens, "labels": [IGNORED] * (length - targets) + tokens[-targets:]})
    return rows


def initial_weights(model: Model, dtype: torch.dtype = torch.float32, seed: int = 0) -> Weights:
    """Random weights of a model, rounded to ``dtype``, in fp32 on the host."""
    cfg = OmegaConf.create({"model": model.block, "tensor_parallel_dim": 1, "custom_sharded_layers": None})
    decoder = decoder_on_meta(cfg, precision_of("fp32"))[0]
    weights = random_weights(decoder.state_dict(), seed)
    return {name: weight.to(dtype).to(torch.float32) for name, weight in weights.items()}


def seed_rows(tokenizer: Any, *, vocab_size: int, number: int, prefix: int = 0, seed: int = 0, packed: bool = False, max_seq_len: int = 4096) -> Any:  # fmt: skip
    """A dataset for a config of finch's or torchtune's: :func:`random_rows`, also packed."""
    rows = with_labels(random_rows(vocab_size, number, prefix=prefix, seed=seed))
    return PackedDataset(rows, max_seq_len=max_seq_len) if packed else rows  # type: ignore[arg-type]


def no_tokenizer(vocab_size: int) -> Any:
    """Stands where a config needs a tokenizer: rows of seeds have tokens."""
    return SimpleNamespace(pad_id=0, max_seq_len=None, vocab_size=vocab_size)


def with_labels(rows: Sequence[Row]) -> list[Row]:
    """The rows as the installed torchtune's datasets give them: its main branch has each label at the token before it."""
    if not labels_come_shifted():
        return list(rows)
    return [{**row, "labels": [*row["labels"][1:], IGNORED]} for row in rows]


def config_blocks(folder: Path, model: Model, **changes: Any) -> dict[str, Any]:
    """A config of finch's recipe on rows of seeds; ``changes`` replace top-level keys, None removes one."""
    vocab_size = model.sizes["vocab_size"]
    blocks = {
        "output_dir": str(folder / "run"),
        "model": model.block,
        "tokenizer": {"_component_": "finch.gpu_check.models.no_tokenizer", "vocab_size": vocab_size},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(folder / "base"),
            "checkpoint_files": None,
            "output_dir": str(folder / "run"),
            "model_type": "LLAMA3",
        },
        "dataset": {"_component_": "finch.gpu_check.models.seed_rows", "vocab_size": vocab_size, "number": BATCH},
        "seed": 0,
        "shuffle": False,
        "epochs": 1,
        "batch_size": BATCH,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5, "weight_decay": 0.0, "fused": True},
        "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 5e-5, "init": 3.0},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "clip_grad_norm": 1.0,
        **changes,
    }
    return {key: value for key, value in blocks.items() if value is not None}


def write_config(folder: Path, blocks: Mapping[str, Any], name: str = "config") -> str:
    """The path of the config's file."""
    file = folder / f"{name}.yaml"
    OmegaConf.save(OmegaConf.create(dict(blocks)), file)
    return str(file)


def step_config(check: Check, model: Model, **changes: Any) -> Any:
    """:func:`config_blocks`, checked, with the defaults of the recipe for the model."""
    file = write_config(check.folder, config_blocks(check.folder, model, **{"device": check.device, **changes}))
    return read(["--config", file], LoraFinetuneKeys if "lora_rank" in model.sizes else FullFinetuneKeys)
