"""Models for torchtune that it does not have (Qwen3) or has differently (Gemma 2, Phi-4), the model and the tokenizer of any
Hugging Face folder, and LoRA layers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finch.models.auto_builders import auto as auto
    from finch.models.auto_builders import lora_auto as lora_auto
    from finch.models.chat_tokenizer import auto_tokenizer as auto_tokenizer

__all__ = ["auto", "auto_tokenizer", "lora_auto"]

_LAZY = {
    "auto": "finch.models.auto_builders",
    "lora_auto": "finch.models.auto_builders",
    "auto_tokenizer": "finch.models.chat_tokenizer",
}


def __getattr__(name: str) -> Any:
    # Imported on first use: the table of families is read without torch.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'finch.models' has no attribute {name!r}")
