"""Qwen3's tokenizer, from the files of its Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from finch.errors import UserError
from finch.models.answer_spans import THINKING
from finch.models.chat_template import ChatTemplate, read_chat_template
from finch.models.chat_tokenizer import TOKENIZER, ChatTokenizer, load_tokenizer

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

# For a folder without a template of its own: plain ChatML, with Qwen3's empty thinking block where thinking is off.
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""


def qwen3_tokenizer(
    path: str,
    merges_file: str | None = None,
    special_tokens_path: str | None = None,
    max_seq_len: int | None = None,
    prompt_template: None = None,
    truncation_type: str = "right",
    thinking: bool = False,
    prompt_style: str = "chat",
) -> ChatTokenizer:
    """The tokenizer of a Qwen3 folder, with that folder's chat template.

    Args:
        path: the folder's tokenizer.json; or its vocab.json, as torchtune's main branch has it: tokenizer.json beside
            it holds the same and the special tokens.
        merges_file: accepted so that such a config works; tokenizer.json has the merges.
        special_tokens_path: a tokenizer.json elsewhere.
        max_seq_len: tokens after which a conversation is truncated; None: never.
        prompt_template: must be None; the folder's chat template decides.
        truncation_type: must be ``right``: what is too long loses its end.
        thinking: whether assistant turns begin with thinking; off: with the empty thinking block a hybrid model's
            template writes.
        prompt_style: as for :func:`finch.models.auto_tokenizer`.

    Raises:
        UserError: a file or special token is missing, or an argument is not supported.
    """
    if prompt_template is not None:
        raise UserError(
            f"tokenizer.prompt_template={prompt_template} is not taken: Qwen3's own chat template decides; remove it"
        )
    if truncation_type != "right":
        raise UserError(
            f"tokenizer.truncation_type={truncation_type} is not taken: answers stand at the end; use right"
        )
    file = Path(special_tokens_path or path)
    if file.name != TOKENIZER:
        file = file.with_name(TOKENIZER)
    loaded = load_tokenizer(file)
    source = read_chat_template(file.parent) or CHATML
    template = ChatTemplate(source, file.parent, {"eos_token": IM_END, "pad_token": END_OF_TEXT}, thinking=thinking)
    tokenizer = ChatTokenizer(
        loaded,
        template,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        max_seq_len=max_seq_len,
        prompt_style=prompt_style,
    )
    for token in (IM_START, *(token for token in THINKING if token in source)):
        tokenizer.special_id(token)
    return tokenizer
