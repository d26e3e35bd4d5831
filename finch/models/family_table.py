"""The model families that finch trains, by config.json's model_type. Needs neither torch nor torchtune."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: as its publisher writes it.
        examples: models of the Hugging Face hub.
        builders: dotted paths of the builders that make it from its sizes.
        packages: packages under torchtune.models and finch.models whose builders make such a model.
        has_lora: whether each builder has a counterpart with LoRA layers, ``lora_`` before its name.
    """

    name: str
    examples: tuple[str, ...]
    builders: tuple[str, ...]
    packages: tuple[str, ...]
    has_lora: bool = True


FAMILIES = {
    "llama": Family(
        "Llama 2, 3, 3.1, 3.2, 3.3 and SmolLM2",
        (
            "meta-llama/Llama-2-7b-hf",
            "meta-llama/Llama-3.1-8B-Instruct",
            "meta-llama/Llama-3.2-1B-Instruct",
            "HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        ("torchtune.models.llama3.llama3", "torchtune.models.llama3_1.llama3_1", "torchtune.models.llama3_2.llama3_2"),
        ("llama2", "llama3", "llama3_1", "llama3_2", "llama3_3", "code_llama2"),
    ),
    "mistral": Family(
        "Mistral",
        ("mistralai/Mistral-7B-v0.1", "mistralai/Mistral-7B-Instruct-v0.3"),
        ("torchtune.models.mistral.mistral",),
        ("mistral",),
    ),
    "gemma": Family(
        "Gemma",
        ("google/gemma-2b", "google/gemma-7b-it"),
        ("torchtune.models.gemma.gemma",),
        ("gemma",),
    ),
    "gemma2": Family(
        "Gemma 2",
        ("google/gemma-2-2b-it", "google/gemma-2-9b"),
        ("finch.models.gemma2.gemma2",),
        ("gemma2",),
        has_lora=False,
    ),
    "phi3": Family(
        "Phi-3 and Phi-4",
        ("microsoft/Phi-3-mini-4k-instruct", "microsoft/phi-4"),
        ("torchtune.models.phi3.phi3",),
        ("phi3", "phi4"),
    ),
    "qwen2": Family(
        "Qwen2 and Qwen2.5",
        ("Qwen/Qwen2-0.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("torchtune.models.qwen2.qwen2",),
        ("qwen2", "qwen2_5"),
    ),
    "qwen3": Family(
        "Qwen3",
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-4B-Instruct-2507"),
        ("finch.models.qwen3.qwen3",),
        ("qwen3",),
    ),
}
