"""Qwen3 for torchtune 0.6.1, under the names that torchtune's main branch uses, so that a config moves over."""

from finch.models.qwen3.builders import (
    qwen3,
    qwen3_0_6b_base,
    qwen3_0_6b_instruct,
    qwen3_1_7b_base,
    qwen3_1_7b_instruct,
    qwen3_4b_base,
    qwen3_4b_instruct,
    qwen3_8b_base,
    qwen3_8b_instruct,
)
from finch.models.qwen3.lora import (
    lora_qwen3,
    lora_qwen3_0_6b_base,
    lora_qwen3_0_6b_instruct,
    lora_qwen3_1_7b_base,
    lora_qwen3_1_7b_instruct,
    lora_qwen3_4b_base,
    lora_qwen3_4b_instruct,
    lora_qwen3_8b_base,
    lora_qwen3_8b_instruct,
)
from finch.models.qwen3.parallelism import qwen3_tp_plan
from finch.models.qwen3.tokenizer import qwen3_tokenizer
from finch.models.qwen3.weights import qwen3_hf_to_tune, qwen3_tune_to_hf

__all__ = [
    "lora_qwen3",
    "lora_qwen3_0_6b_base",
    "lora_qwen3_0_6b_instruct",
    "lora_qwen3_1_7b_base",
    "lora_qwen3_1_7b_instruct",
    "lora_qwen3_4b_base",
    "lora_qwen3_4b_instruct",
    "lora_qwen3_8b_base",
    "lora_qwen3_8b_instruct",
    "qwen3",
    "qwen3_0_6b_base",
    "qwen3_0_6b_instruct",
    "qwen3_1_7b_base",
    "qwen3_1_7b_instruct",
    "qwen3_4b_base",
    "qwen3_4b_instruct",
    "qwen3_8b_base",
    "qwen3_8b_instruct",
    "qwen3_hf_to_tune",
    "qwen3_tokenizer",
    "qwen3_tp_plan",
    "qwen3_tune_to_hf",
]
