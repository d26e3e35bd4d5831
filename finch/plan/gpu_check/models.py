"""The models, rows and configs of the check: nothing is downloaded, all is from seeds."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from tokenizers import ByteLevelBPETokenizer, pre_tokenizers
from torchtune.datasets import PackedDataset

from finch.config.instantiate import build, find_config, load_config
from finch.config.parser import read
from finch.config.schema import ROWS
from finch.models.families import SIZES
from finch.models.qwen3 import SIZE_0_6B, SIZE_4B, qwen3_tune_to_hf
from finch.objectives import IGNORE_INDEX

Weights = dict[str, torch.Tensor]
Row = dict[str, list[int]]

TOKENS, TARGETS, PREFIX = (40, 130), 37, 27
"""A row as TOFU's: between these tokens, its last ones targets; what all rows begin with where they share a prefix."""
BATCH = 16
_WORDS = ("the", "old", "red", "bird", "fox", "river", "stone", "sings", "runs", "near", "under", "often", "never")


@dataclass(frozen=True)
class Model:
    """A model by the dotted path of its builder and the builder's arguments; ``name`` is for lines of the report."""

    name: str
    component: str
    sizes: Mapping[str, Any] = field(hash=False)

    @property
    def block(self) -> dict[str, Any]:
        """The ``model`` block of a config."""
        return {"_component_": self.component, **self.sizes}

    @property
    def head_dim(self) -> int:
        return int(self.sizes.get("head_dim") or self.sizes["embed_dim"] // self.sizes["num_heads"])

    def huggingface_config(self) -> dict[str, Any]:
        """config.json of a Qwen3."""
        sizes = {SIZES.get(name, name): value for name, value in self.sizes.items()}
        return {"rope_theta": 1e6, "rms_norm_eps": 1e-6, "pad_token_id": 0, "eos_token_id": 1, **sizes}


def _llama(name: str, **sizes: Any) -> Model:
    sizes = {"max_seq_len": 8192, "norm_eps": 1e-5, "rope_base": 500_000, **sizes}
    return Model(name, "torchtune.models.llama3.llama3", sizes)


def qwen3_model(name: str, sizes: Mapping[str, Any], **changes: Any) -> Model:
    return Model(name, "finch.models.qwen3.qwen3", {"max_seq_len": 8192, "head_dim": 16, **sizes, **changes})


TINY_SIZE = {
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "intermediate_dim": 48,
    "vocab_size": 320,
}
_S_SIZE = {"num_layers": 8, "num_heads": 8, "num_kv_heads": 4, "embed_dim": 512, "intermediate_dim": 1408}
TINY = {"S": _llama("tiny Llama", **TINY_SIZE), "Q": qwen3_model("tiny Qwen3", TINY_SIZE, tie_word_embeddings=True)}
MEDIUM = {"S": _llama("S", vocab_size=32_000, **_S_SIZE), "Q": qwen3_model("Q", SIZE_0_6B, num_layers=8)}
QWEN3_4B = qwen3_model("Qwen3-4B", SIZE_4B)


def medium_models(device: str) -> dict[str, Model]:
    """S (Llama) and Q (Qwen3, tied); tiny on a CPU."""
    return TINY if device == "cpu" else MEDIUM


@functools.cache
def initial_weights(model: Model) -> Weights:
    """Random fp32 weights by the names of the decoder's state dict, on the host: large enough that attention and positions matter."""
    return draw_weights(model, "cpu", torch.float32)


def draw_weights(model: Model, device: str, dtype: torch.dtype) -> Weights:
    """The same, drawn on ``device``, where a large model's take seconds, and kept in ``dtype``; on the host."""
    generator = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        shapes = build(OmegaConf.create(model.block), "model").state_dict()
    return {name: draw_weight(like.shape, generator).to("cpu", dtype) for name, like in shapes.items()}


def draw_weight(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """In fp32, on the generator's device."""
    value = torch.empty(shape, device=generator.device)
    if len(shape) > 1:
        return value.normal_(std=shape[-1] ** -0.5, generator=generator)
    return value.uniform_(0.5, 1.5, generator=generator)  # scales of 1 would hide a norm in the wrong place


def random_rows(vocab_size: int, number: int, *, has_prefix: bool = False) -> list[Row]:
    """Rows of unequal lengths: ``tokens``, and ``labels`` of the same positions, -100 before the targets. With a prefix all begin alike."""
    generator = torch.Generator().manual_seed(0)

    def draw(length: int) -> list[int]:
        return torch.randint(1, vocab_size, (length,), generator=generator).tolist()

    shared, rows = draw(PREFIX if has_prefix else 0), []
    for _ in range(number):
        length = int(torch.randint(*TOKENS, (), generator=generator))
        tokens = [*shared, *draw(length - len(shared))]
        targets = min(TARGETS, length - PREFIX - 1)
        rows.append({"tokens": tokens, "labels": [IGNORE_INDEX] * (length - targets) + tokens[-targets:]})
    return rows


def dataset_of(rows: Sequence[Row], pack: int = 0) -> Any:
    """The rows as torchtune's datasets give them, in packs of ``pack`` tokens unless it is 0."""
    return PackedDataset(rows, max_seq_len=pack) if pack else rows


def write_config(folder: Path, model: Model, name: str = "config", **changes: Any) -> str:
    """Writes the shipped config with another model, ``BATCH`` rows at once, and ``changes`` of top-level keys, None removes one; returns its path."""
    shipped: Any = OmegaConf.to_container(load_config(find_config("qwen3/4B_finch")))
    blocks = {
        **shipped,
        "output_dir": str(folder / "run"),
        "model_dir": str(folder / "base"),
        "model": model.block,
        "dataset": {"_component_": ROWS, "data_files": str(folder / "rows.jsonl")},
        "dataset_validation": None,
        "lr_scheduler": {**shipped["lr_scheduler"], "init": 3.0},
        "batch_size": BATCH,
        "shuffle": False,
        "log_level": "ERROR",
        **changes,
    }
    file = folder / f"{name}.yaml"
    OmegaConf.save(OmegaConf.create({key: value for key, value in blocks.items() if value is not None}), file)
    return str(file)


def step_config(folder: Path, model: Model, **changes: Any) -> Any:
    """A config of one step, checked, with the defaults of the recipe for its model."""
    return read(["--config", write_config(folder, model, **changes)])


def write_base(folder: Path, model: Model, weights: Weights | None = None) -> None:
    """``base``, a pretrained folder of a Qwen3, and ``rows.jsonl``, question-answer rows of unequal lengths; without ``weights`` the initial ones."""
    base = folder / "base"
    base.mkdir()
    tuned = initial_weights(model) if weights is None else weights
    stored = {name: weight.contiguous() for name, weight in qwen3_tune_to_hf(tuned).items()}
    save_file(stored, base / "model.safetensors", metadata={"format": "pt"})
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    (base / "config.json").write_text(json.dumps({**kind, **model.huggingface_config()}), encoding="utf-8")
    write_tokenizer(base)
    draw = random.Random(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(3 * BATCH):
            row = {key: " ".join(draw.choices(_WORDS, k=draw.randint(2, 8))) for key in ("question", "answer")}
            print(json.dumps(row), file=file)


def write_tokenizer(folder: Path) -> None:
    """tokenizer.json whose tokens are single bytes, and its settings."""
    tokens = ["<pad>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = ByteLevelBPETokenizer({token: number for number, token in enumerate(tokens)}, [])
    tokenizer.add_special_tokens(tokens[:2])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": tokens[0], "eos_token": tokens[1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
