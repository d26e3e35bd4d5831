"""What finch needs from torchtune's main branch, as far as an install of 0.6.1 can show: labels, plans, imported names."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchtune
from helpers.runs import ROOT
from torchtune.data import padded_collate_sft
from torchtune.datasets._sft import SFTTransform
from torchtune.models.llama3 import base_llama_tp_plan

from finch.config import torchtune_names

FILES = [*(ROOT / "finch").rglob("*.py"), *(ROOT / "recipes").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
IGNORED = -100

# Moved, renamed or changed between 0.6.1 and main: for finch/config/torchtune_names.py alone.
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
UNMOVED = """
torchtune.config: instantiate
torchtune.data: InputOutputToMessages Message padded_collate_packed padded_collate_sft
torchtune.datasets: ConcatDataset PackedDataset TextCompletionDataset
torchtune.datasets._sft: SFTTransform
torchtune.models.convert_weights: get_mapped_key hf_to_tune meta_to_tune tune_to_hf tune_to_meta
torchtune.models.gemma2: gemma2
torchtune.models.gemma2._component_builders: Gemma2FinalNorm
torchtune.models.gemma2._convert_weights: gemma2_hf_to_tune gemma2_tune_to_hf
torchtune.models.llama2: llama2 llama2_tokenizer
torchtune.models.llama3_1._position_embeddings: Llama3ScaledRoPE
torchtune.models.phi3: phi3 phi3_hf_to_tune phi3_tune_to_hf
torchtune.models.qwen2: qwen2_hf_to_tune qwen2_tune_to_hf
torchtune.models.qwen2._positional_embeddings: Qwen2RotaryPositionalEmbeddings
torchtune.modules: FeedForward MultiHeadAttention RMSNorm RotaryPositionalEmbeddings TiedLinear TransformerDecoder TransformerSelfAttentionLayer
torchtune.modules.peft: DoRALinear LORA_ATTN_MODULES LoRALinear disable_adapter
torchtune.modules.transforms: Transform
torchtune.modules.transforms.tokenizers: ModelTokenizer
torchtune.recipe_interfaces: FTRecipeInterface
torchtune.training: DummyProfiler FullModelHFCheckpointer FullModelMetaCheckpointer FullModelTorchTuneCheckpointer cleanup_before_training compile_model get_act_offloading_ctx_manager get_memory_stats log_memory_stats prepare_mha_for_tp set_activation_checkpointing set_default_dtype set_seed
torchtune.training.activations: apply_selective_activation_checkpointing
torchtune.training.lr_schedulers: get_cosine_schedule_with_warmup
"""
UNMOVED = {module: names.split() for module, names in (line.split(":") for line in UNMOVED.strip().splitlines())}
MODULES = {
    "torchtune.config",
    "torchtune.models.gemma2._convert_weights",
    "torchtune.modules",
    "torchtune.training",
    "torchtune.utils",
}


class MainsTransform(SFTTransform):
    """Returns rows as main's SFTTransform does: each label at the token before it."""

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


def test_shift_labels_moves_each_label_to_the_token_before(transform: type[SFTTransform]) -> None:
    rows = [([5, 6, 7, 8], [True, True, False, False]), ([9, 4, 3], [True, False, False]), ([2, 2], [True, True])]
    prepare = transform(model_transform=lambda row: {"tokens": row[0], "mask": row[1]})
    batch = padded_collate_sft([prepare(row) for row in rows], padding_idx=0, ignore_idx=IGNORED)
    expected = torch.full((3, 4), IGNORED)
    for place, (tokens, mask) in enumerate(rows):
        for t in range(1, len(tokens)):
            if not mask[t]:
                expected[place, t - 1] = tokens[t]
    assert torch.equal(torchtune_names.shift_labels(batch["labels"]), expected)
    assert torch.equal(torchtune_names.shift_labels(batch["labels"][0]), expected[0])  # a single row


def test_labels_come_shifted_matches_the_installed_recipe() -> None:
    """torchtune's own recipe shifts labels if and only if its datasets do not."""
    recipe = Path(torchtune.__file__).parent.parent / "recipes" / "full_finetune_distributed.py"
    assert ("labels[..., 1:]" in recipe.read_text()) is not torchtune_names.labels_come_shifted()


def test_plan_arguments_are_those_the_builder_accepts() -> None:
    decoder = torch.nn.Identity()

    def builder_of_main(model: torch.nn.Module, *, inference: bool = False, fp8: bool = False) -> dict[str, Any]:
        return {}

    assert torchtune_names.plan_arguments(builder_of_main, decoder) == {"model": decoder, "inference": True}
    arguments = torchtune_names.plan_arguments(base_llama_tp_plan, decoder)
    assert set(base_llama_tp_plan(**arguments)) >= {"layers.*.attn.q_proj", "layers.*.mlp.w1"}
    inspect.signature(base_llama_tp_plan).bind(**arguments)


@pytest.mark.parametrize("module", UNMOVED)
def test_unmoved_names_are_installed(module: str) -> None:
    imported = importlib.import_module(module)
    assert [name for name in UNMOVED[module] if not hasattr(imported, name)] == []


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_only_torchtune_names_imports_what_moved(file: Path) -> None:
    if file.name == "torchtune_names.py":
        return
    used = set(_torchtune_names(file.read_text(encoding="utf-8")))
    assert used & MOVED == set(), "import it from finch.config.torchtune_names"
    listed = {f"{module}.{name}" for module, names in UNMOVED.items() for name in names}
    advice = "read it on torchtune's main branch, then list it in UNMOVED or put it into finch.config.torchtune_names"
    assert used - MODULES - listed == set(), advice


def test_listing_finds_every_form_of_import() -> None:
    source = (
        "from torchtune import modules as m\nimport torchtune.training\ndef late(): m.TiedLinear, torchtune.utils.log"
    )
    expected = {"modules", "training", "modules.TiedLinear", "utils", "utils.log"}
    assert set(_torchtune_names(source)) == {f"torchtune.{name}" for name in expected}


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
