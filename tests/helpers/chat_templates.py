"""Short chat templates that behave as those of the families, each with the special tokens it needs."""

from __future__ import annotations

from dataclasses import dataclass

from helpers.tokenizers import HYBRID_TEMPLATE


@dataclass(frozen=True)
class Family:
    """A chat template and the tokenizer files it comes with.

    Attributes:
        template: Jinja source.
        tokens: special tokens; the first three are BOS (empty: none), EOS and the one that closes an answer.
        is_sentencepiece: whether spaces are part of the following token, as in Llama 2; else a byte-level BPE.
    """

    template: str
    tokens: tuple[str, ...]
    is_sentencepiece: bool = False


_CHATML = """\
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_LLAMA2 = """\
{%- set start = 1 if messages[0].role == 'system' else 0 %}
{%- for m in messages[start:] %}
{%- if m.role == 'user' %}
{%- set system = '<<SYS>>\\n' ~ messages[0].content ~ '\\n<</SYS>>\\n\\n' if loop.first and start else '' %}
{{- bos_token ~ '[INST] ' ~ system ~ m.content | trim ~ ' [/INST]' }}
{%- else %}{{ ' ' ~ m.content | trim ~ ' ' ~ eos_token }}{% endif %}
{%- endfor %}"""

_LLAMA3 = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\\n\\n' ~ m.content | trim ~ '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}{% else %}{{ ' ' ~ m.content ~ eos_token }}{% endif %}
{%- endfor %}"""

_PHI3 = """\
{{- bos_token }}
{%- for m in messages %}{{ '<|' ~ m.role ~ '|>\\n' ~ m.content ~ '<|end|>\\n' }}{% endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""

_IM = ("<|im_start|>",)
_THINK = ("<think>", "</think>")
CHAT_FAMILIES = {
    "llama2": Family(_LLAMA2, ("<s>", "</s>", "</s>"), is_sentencepiece=True),
    "llama3": Family(_LLAMA3, ("<|bos|>", "<|eos|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")),
    "mistral": Family(_MISTRAL, ("<s>", "</s>", "</s>", "[INST]", "[/INST]"), is_sentencepiece=True),
    "qwen2": Family(_CHATML, ("", "<|im_end|>", "<|im_end|>", "<|endoftext|>", *_IM)),
    "qwen3": Family(HYBRID_TEMPLATE, ("", "<|im_end|>", "<|im_end|>", "<|endoftext|>", *_IM, *_THINK)),
    "phi3": Family(
        _PHI3, ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), is_sentencepiece=True
    ),
    "smollm2": Family(_CHATML, ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")),
}
