"""Tokenizer files in the formats of Qwen3 and Llama-3, trained or written on the spot."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

QWEN3_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]

# What a hybrid thinking model's template does, in a few words of our own: a thinking block in the last assistant turn
# alone, an empty one in the generation prompt where thinking is off.
HYBRID_TEMPLATE = """\
{%- for m in messages %}
{{- '<|im_start|>' ~ m.role ~ '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- m.content ~ '<|im_end|>' ~ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def write_qwen3_tokenizer(folder: Path, words: list[str], template: str | None = HYBRID_TEMPLATE) -> None:
    """A byte-level BPE tokenizer.json with Qwen3's special tokens, and tokenizer_config.json with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    _train(tokenizer, words, 320, QWEN3_SPECIAL)
    _write(folder, tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template)


def write_llama3_tokenizer(folder: Path) -> None:
    """original/tokenizer.model in tiktoken's format: the 256 bytes and a few merges."""
    tokens = [bytes([value]) for value in range(256)] + [b"th", b"the", b" a", b"in", b"er"]
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens)]
    (folder / "original").mkdir(parents=True, exist_ok=True)
    (folder / "original" / "tokenizer.model").write_text("\n".join(lines) + "\n")


def write_tokenizer(
    folder: Path,
    words: list[str],
    *,
    bos: str | None,
    eos: str,
    special: list[str],
    template: str | None = None,
    is_sentencepiece: bool = False,
    adds_bos: bool = True,
    **settings: Any,
) -> None:
    """tokenizer.json and tokenizer_config.json of any family.

    Args:
        folder: is created.
        words: to train on.
        bos: begins a text; None: there is none.
        eos: ends a text.
        special: the other special tokens.
        template: the chat template, None for none.
        is_sentencepiece: spaces are part of the following token and one is put before the text, as in Llama 2.
        adds_bos: whether the tokenizer puts ``bos`` before a plain text.
        settings: further keys of tokenizer_config.json.
    """
    names = dict.fromkeys([*([bos] if bos else []), eos, "<unk>", *special])
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    _train(tokenizer, words, 500, list(names), is_sentencepiece)
    if bos and adds_bos:
        number = tokenizer.token_to_id(bos)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, number)])
    _write(folder, tokenizer, **{"bos_token": bos, "eos_token": eos, "chat_template": template, **settings})


def _train(
    tokenizer: Tokenizer, words: list[str], vocab_size: int, special: list[str], is_sentencepiece: bool = False
) -> None:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if is_sentencepiece:
        alphabet = [chr(number) for number in range(33, 127)] + ["\n"]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        tokenizer.decoder = decoders.Metaspace()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([" ".join(words)] * 5, trainers.BpeTrainer(vocab_size=vocab_size, **options))


def _write(folder: Path, tokenizer: Tokenizer, **config: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    kept = {key: value for key, value in config.items() if value is not None}
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **kept})
    (folder / "tokenizer_config.json").write_text(text)
