"""The tokenizer of any Hugging Face folder with a tokenizer.json: ``finch.models.auto_tokenizer``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from finch.errors import UserError
from finch.log import logger
from finch.models.chat_template import ChatTemplate, read_chat_template
from finch.models.chat_tokenizer import TOKENIZER, ChatTokenizer, load_tokenizer
from finch.models.hf_config import CONFIG, check_folder, read_settings

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SPECIAL_TOKENS_MAP, _TOKENIZER_CONFIG = "special_tokens_map.json", "tokenizer_config.json"

# For a folder without a template.
PLAIN_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{{- message.role | capitalize ~ ': ' ~ message.content | trim }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- if not loop.last %}{{ '\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\nAssistant:' }}{% endif %}"""

# The same in the form of the FINCH paper's authors, whose code separates turns by blank lines.
AUTHORS_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role != 'system' %}{{ message.role | capitalize ~ ': ' }}{% endif %}
{{- message.content | trim }}
{%- if message.role == 'assistant' %}{{ eos_token }}{% endif %}
{%- if message.content and not loop.last %}{{ '\\n\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n\\nAssistant:' }}{% endif %}"""


def auto_tokenizer(
    path: str, max_seq_len: int | None = None, thinking: bool = False, prompt_style: str = "chat"
) -> ChatTokenizer:
    """The tokenizer of a folder, with the folder's chat template.

    A folder without a template gets prompts of the form ``User: ...`` and ``Assistant: ...``, and a log line says so: BOS
    comes first where the tokenizer adds it to a plain text, EOS after each answer. Without a pad token EOS pads; it stays a
    target where it closes an answer.

    Args:
        path: a Hugging Face folder with tokenizer.json.
        max_seq_len: tokens after which a conversation is truncated; None: never.
        thinking: the template's ``enable_thinking``; off: answers follow an empty thinking block where the template writes it.
        prompt_style: ``chat``, or ``authors`` for the prompts of the FINCH paper's code: an empty system turn where a conversation
            has none, and blank lines between the turns where the folder has no template.

    Raises:
        UserError: a missing folder or file, a broken one, another prompt_style, no EOS, or a template that does not show what an answer is.
    """
    folder = check_folder(path, "tokenizer.path")
    if not (folder / TOKENIZER).is_file() and (folder / "tokenizer.model").is_file():
        raise UserError(
            f"tokenizer.path={path} has tokenizer.model, but no {TOKENIZER}; write it with python -c "
            f"\"from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')\""
        )
    tokenizer = load_tokenizer(folder / TOKENIZER)
    settings = _read_tokenizer_settings(folder)
    special = {name: token for name in _SPECIAL_TOKENS if (token := _content(settings.get(name)))}
    if "eos_token" not in special:
        special["eos_token"] = _eos_token(folder, tokenizer)
    bos = _bos_token(tokenizer)
    template = read_chat_template(folder)
    if template is None:
        logger.info(
            f"tokenizer: {folder} has no chat template; prompts are plain text, 'User: ...' and 'Assistant: ...' on lines of their own"
        )
        template = AUTHORS_TEMPLATE if prompt_style == "authors" else PLAIN_TEMPLATE
        special |= {"bos_token": bos or ""}
    return ChatTokenizer(
        tokenizer,
        ChatTemplate(template, folder, special, thinking=thinking),
        bos_token=bos,
        eos_token=special["eos_token"],
        pad_token=special.get("pad_token", special["eos_token"]),
        max_seq_len=max_seq_len,
        prompt_style=prompt_style,
    )


def _read_tokenizer_settings(folder: Path) -> dict[str, Any]:
    """The keys of special_tokens_map.json and tokenizer_config.json; the latter counts."""
    settings: dict[str, Any] = {}
    for name in (_SPECIAL_TOKENS_MAP, _TOKENIZER_CONFIG):
        if (folder / name).is_file():
            settings |= read_settings(folder / name)
    return settings


def _content(token: Any) -> str | None:
    """A special token's text; newer files have it alone, older ones with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def _eos_token(folder: Path, tokenizer: Tokenizer) -> str:
    """config.json's, for a folder whose tokenizer files do not name one."""
    number = read_settings(folder / CONFIG).get("eos_token_id") if (folder / CONFIG).is_file() else None
    number = number[0] if isinstance(number, list) and number else number
    token = tokenizer.id_to_token(number) if isinstance(number, int) else None
    if token is None:
        raise UserError(f"tokenizer.path={folder} names no eos_token; name it in {_TOKENIZER_CONFIG}")
    return token


def _bos_token(tokenizer: Tokenizer) -> str | None:
    """The token that tokenizer.json puts before a plain text; as in transformers 5, ``add_bos_token`` does not count."""
    plain, complete = (tokenizer.encode("a", add_special_tokens=is_special).tokens for is_special in (False, True))
    return complete[0] if complete[:1] != plain[:1] else None
