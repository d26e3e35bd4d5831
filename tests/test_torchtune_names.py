"""finch on torchtune's main branch, as far as an install of 0.6.1 can show: labels, plans, and who imports what."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtune
from torchtune.data import padded_collate_sft
from torchtune.datasets._sft import SFTTransform
from torchtune.models.llama3 import base_llama_tp_plan

from finch import torchtune_names

ROOT = Path(__file__).parent.parent
FILES = [*(ROOT / "finch").rglob("*.py"), *(ROOT / "recipes").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
IGNORED = -100

# Moved, renamed or changed between 0.6.1 and main: for finch/torchtune_names.py alone.
MOVED = {
    "torchtune.modules.loss",
    "torchtune.modules.loss.CEWithChunkedOutputLoss",
    "torchtune.modules.loss.LinearCrossEntropyLoss",
    "torchtune.models.gemma2._attention",
    "torchtune.models.gemma2._attention.Gemma2Attention",
    "torchtune.models.llama3.base_llama_tp_plan",
    "torchtune.training.ParallelDims",
}
# In the same place in both, with the arguments that finch gives. Before a name is added here: read it on main.
UNMOVED = {
    "torchtune.config": {"instantiate"},
    "torchtune.config._errors": {"InstantiationError"},
    "torchtune.config._parse": {"TuneRecipeArgumentParser"},
    "torchtune.config._utils": {"_get_component_from_path", "_merge_yaml_and_cli_args"},
    "torchtune.data": {"InputOutputToMessages", "Message", "padded_collate_packed", "padded_collate_sft"},
    "torchtune.datasets": {"ConcatDataset", "PackedDataset"},
    "torchtune.datasets._sft": {"SFTTransform"},
    "torchtune.models.convert_weights": {"get_mapped_key", "hf_to_tune", "meta_to_tune", "tune_to_hf", "tune_to_meta"},
    "torchtune.models.gemma2": {"gemma2"},
    "torchtune.models.gemma2._component_builders": {"Gemma2FinalNorm"},
    "torchtune.models.gemma2._convert_weights": {"gemma2_hf_to_tune", "gemma2_tune_to_hf"},
    "torchtune.models.llama2": {"llama2", "llama2_tokenizer"},
    "torchtune.models.llama3_1._position_embeddings": {"Llama3ScaledRoPE"},
    "torchtune.models.phi3": {"phi3", "phi3_hf_to_tune", "phi3_tune_to_hf"},
    "torchtune.models.qwen2": {"qwen2_hf_to_tune", "qwen2_tune_to_hf"},
    "torchtune.models.qwen2._positional_embeddings": {"Qwen2RotaryPositionalEmbeddings"},
    "torchtune.modules": {
        "FeedForward",
        "MultiHeadAttention",
        "RMSNorm",
        "TiedLinear",
        "TransformerDecoder",
        "TransformerSelfAttentionLayer",
    },
    "torchtune.modules.peft": {"DoRALinear", "LORA_ATTN_MODULES", "LoRALinear"},
    "torchtune.modules.transforms": {"Transform"},
    "torchtune.modules.transforms.tokenizers": {"ModelTokenizer"},
    "torchtune.recipe_interfaces": {"FTRecipeInterface"},
    "torchtune.training": {
        "DummyProfiler",
        "FullModelHFCheckpointer",
        "FullModelMetaCheckpointer",
        "FullModelTorchTuneCheckpointer",
        "compile_model",
        "get_act_offloading_ctx_manager",
        "get_memory_stats",
        "prepare_mha_for_tp",
        "set_activation_checkpointing",
        "set_default_dtype",
        "set_seed",
    },
    "torchtune.training.activations": {"apply_selective_activation_checkpointing"},
    "torchtune.training.lr_schedulers": {"get_cosine_schedule_with_warmup"},
    "torchtune.utils": {"get_logger", "log_rank_zero"},
}
MODULES = {
    "torchtune.config",
    "torchtune.models.gemma2._convert_weights",
    "torchtune.modules",
    "torchtune.training",
    "torchtune.utils",
}


class MainsTransform(SFTTransform):
    """What main's SFTTransform gives: each label under the token before it."""

    def __call__(self, sample: Any) -> dict[str, Any]:
        row = super().__call__(sample)
        return {**row, "labels": [*row["labels"][1:], IGNORED]}


@pytest.fixture(params=["0.6.1", "main"])
def transform(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[SFTTransform]]:
    """SFTTransform of either version, installed where finch looks."""
    kind = SFTTransform if request.param == "0.6.1" else MainsTransform
    monkeypatch.setattr(torchtune_names, "SFTTransform", kind)
    torchtune_names.labels_come_shifted.cache_clear()
    yield kind
    torchtune_names.labels_come_shifted.cache_clear()


def test_each_target_stands_under_the_token_before_it(transform: type[SFTTransform]) -> None:
    rows = [([5, 6, 7, 8], [True, True, False, False]), ([9, 4, 3], [True, False, False]), ([2, 2], [True, True])]
    prepare = transform(model_transform=lambda row: {"tokens": row[0], "mask": row[1]})
    batch = padded_collate_sft([prepare(row) for row in rows], padding_idx=0, ignore_idx=IGNORED)
    expected = torch.full((3, 4), IGNORED)
    for place, (tokens, mask) in enumerate(rows):
        for t in range(1, len(tokens)):
            if not mask[t]:
                expected[place, t - 1] = tokens[t]
    assert torch.equal(torchtune_names.shift_labels(batch["labels"]), expected)
    assert torch.equal(torchtune_names.shift_labels(batch["labels"][0]), expected[0])  # a row alone


def test_the_installed_torchtunes_convention_is_told_by_its_own_recipe() -> None:
    """Whoever ships the datasets ships the recipe: it shifts labels if and only if they do not."""
    recipe = Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_distributed.py"
    assert ("labels[..., 1:]" in recipe.read_text()) is not torchtune_names.labels_come_shifted()


def test_a_plan_is_asked_for_with_what_its_builder_takes() -> None:
    decoder = torch.nn.Identity()

    def mains(model: torch.nn.Module, *, inference: bool = False, enable_fp8_training: bool = False) -> dict:
        return {}

    assert torchtune_names.plan_arguments(mains, decoder) == {"model": decoder, "inference": True}
    arguments = torchtune_names.plan_arguments(base_llama_tp_plan, decoder)
    assert set(base_llama_tp_plan(**arguments)) >= {"layers.*.attn.q_proj", "layers.*.mlp.w1"}
    inspect.signature(base_llama_tp_plan).bind(**arguments)


def test_plain_cross_entropy_is_what_is_installed() -> None:
    from torchtune.modules import loss

    there = [name for name in ("CEWithChunkedOutputLoss", "LinearCrossEntropyLoss") if hasattr(loss, name)]
    assert there
    assert (torch.nn.CrossEntropyLoss, *(getattr(loss, name) for name in there)) == torchtune_names.PLAIN_CROSS_ENTROPY


@pytest.mark.parametrize("module", UNMOVED)
def test_every_unmoved_name_is_installed(module: str) -> None:
    there = importlib.import_module(module)
    assert [name for name in sorted(UNMOVED[module]) if not hasattr(there, name)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_one_file_imports_what_moved(file: Path) -> None:
    if file.name == "torchtune_names.py":
        return
    used = set(_torchtune_names(file.read_text(encoding="utf-8")))
    assert used & MOVED == set(), "import it from finch.torchtune_names"
    unread = {
        name for name in used - MODULES if name.rpartition(".")[2] not in UNMOVED.get(name.rpartition(".")[0], ())
    }
    assert unread == set(), (
        "read it on torchtune's main branch, then list it in UNMOVED or put it into finch.torchtune_names"
    )


def test_the_walk_over_imports_finds_every_way_to_write_one() -> None:
    source = """
from torchtune import modules as m, training
from torchtune.modules.loss import CEWithChunkedOutputLoss as CE
def late():
    import torchtune.modules.loss
    from torchtune.training import ParallelDims
    return m.TiedLinear, training.activations.apply, torchtune.utils.get_logger
"""
    assert set(_torchtune_names(source)) == {
        "torchtune.modules",
        "torchtune.training",
        "torchtune.modules.loss.CEWithChunkedOutputLoss",
        "torchtune.modules.loss",
        "torchtune.training.ParallelDims",
        "torchtune.modules.TiedLinear",
        "torchtune.training.activations",
        "torchtune.training.activations.apply",
        "torchtune.utils",
        "torchtune.utils.get_logger",
    }


_LAYOUT_OF_MAIN = """
import importlib, pkgutil, sys
import torch
import torchtune.training, torchtune.models.llama3, torchtune.datasets._sft as sft
from torchtune.modules import loss, tied_linear, transformer

# Names gone, names new.
import torchtune.models.gemma2._attention
del torchtune.models.gemma2._attention.Gemma2Attention
del loss.CEWithChunkedOutputLoss
class LinearCrossEntropyLoss(torch.nn.Module):
    def __init__(self, num_output_chunks=8, ignore_index=-100, tp_enabled=False, mask_ignored_tokens=True):
        super().__init__()
        self.num_output_chunks = num_output_chunks
loss.LinearCrossEntropyLoss = LinearCrossEntropyLoss
del transformer.TransformerDecoder.set_num_output_chunks, transformer.TransformerDecoder.chunked_output
tied_linear.TiedLinear.weight = property(lambda tied: tied.tied_module.weight)

# Arguments new.
def base_llama_tp_plan(model, *, inference=False, enable_fp8_training=False):
    return {"layers.*.mlp.w1": None}
torchtune.models.llama3.base_llama_tp_plan = base_llama_tp_plan

# Labels shifted in the dataset.
call = sft.SFTTransform.__call__
def shifted(self, sample):
    row = call(self, sample)
    row["labels"] = [*row["labels"][1:], -100]
    return row
sft.SFTTransform.__call__ = shifted

import finch
names = [module.name for module in pkgutil.walk_packages(finch.__path__, "finch.") if not module.name.endswith("__main__")]
for name in [*names, "finch_full_finetune"]:
    importlib.import_module(name)

from finch.training import config_checks as checks
from finch import torchtune_names
assert checks.PLAIN_CROSS_ENTROPY == (torch.nn.CrossEntropyLoss, LinearCrossEntropyLoss)
assert torchtune_names.labels_come_shifted()
assert torchtune_names.plan_arguments(base_llama_tp_plan, "decoder") == {"model": "decoder", "inference": True}

# A decoder ends in `unembed` in both: TokenLoss takes its place.
from torchtune.models.llama3 import llama3
from finch.training.token_loss import TokenLoss
torch.manual_seed(0)
decoder = llama3(vocab_size=17, num_layers=1, num_heads=2, num_kv_heads=1, embed_dim=16, max_seq_len=8, intermediate_dim=24)
tokens = torch.randint(0, 17, (2, 8))
labels = tokens.roll(-1, 1)
wanted = torch.nn.functional.cross_entropy(decoder(tokens).flatten(0, 1), labels.flatten(), reduction="none")
torch.testing.assert_close(TokenLoss(decoder)(tokens, labels).flatten(), wanted)
print(len(names), "modules")
"""


@pytest.mark.slow
def test_finch_imports_on_mains_layout() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LAYOUT_OF_MAIN],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'recipes'}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) > 30


def _torchtune_names(source: str) -> Iterator[str]:
    """Dotted paths into torchtune: imported ones, and attributes of what was imported."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torchtune":
            for name in node.names:
                bound[name.asname or name.name] = path = f"{node.module}.{name.name}"
                yield path
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "torchtune":
                    bound[name.asname or "torchtune"] = name.name if name.asname else "torchtune"
                    if name.name != "torchtune":
                        yield name.name
    for node in ast.walk(tree):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in bound:
            path = bound[node.id]
            if path != "torchtune" and not path.rpartition(".")[2][0].islower():
                continue  # an attribute of a class
            for part in reversed(parts):
                path = f"{path}.{part}"
                yield path
