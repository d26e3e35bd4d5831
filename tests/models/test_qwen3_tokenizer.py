"""Qwen3's tokenizer against transformers' on the same files."""

import json

import pytest
from helpers.tokenizers import QWEN3_SPECIAL, write_qwen3_tokenizer
from torchtune.data import Message
from transformers import AutoTokenizer

from benchmarks.tiny_text import WORDS
from finch.errors import UserError
from finch.models.qwen3 import qwen3_tokenizer


@pytest.fixture
def folder(tmp_path):
    write_qwen3_tokenizer(tmp_path, WORDS)
    return tmp_path


def tokenizer_of(folder, **options):
    return qwen3_tokenizer(str(folder / "tokenizer.json"), **options)


def tokens_of_transformers(folder, messages, **options):
    plain = [{"role": message.role, "content": message.text_content} for message in messages]
    return AutoTokenizer.from_pretrained(folder).apply_chat_template(plain, return_dict=True, **options)["input_ids"]


def targets(tokenizer, messages):
    """The text of the tokens that are trained on."""
    tokens, mask = tokenizer.tokenize_messages(messages)
    kept = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    return tokenizer.decode(kept, skip_special_tokens=False)


def turns(*pairs, masked=True):
    messages = []
    for user, assistant in pairs:
        messages += [Message(role="user", content=user, masked=masked), Message(role="assistant", content=assistant)]
    return messages


CONVERSATIONS = {
    "one turn": [("who sings?", "the red bird")],
    "two turns": [("who sings?", "the red bird"), ("and who sleeps near a tree?", "a fox\nand a stone")],
}


@pytest.mark.parametrize("pairs", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("thinking", [False, True])
def test_tokens_equal_transformers(folder, pairs, thinking):
    tokenizer, messages = tokenizer_of(folder, thinking=thinking), turns(*pairs)
    expected = tokens_of_transformers(folder, messages, enable_thinking=thinking)
    assert tokenizer.tokenize_messages(messages)[0] == expected
    prompt = tokens_of_transformers(folder, messages[:-1], enable_thinking=thinking, add_generation_prompt=True)
    assert tokenizer.tokenize_messages(messages[:-1], add_end_tokens=False)[0] == prompt


def test_train_on_input_has_no_mask(folder):
    _, mask = tokenizer_of(folder).tokenize_messages(turns(("a", "b"), masked=False))
    assert not any(mask)


def test_cut_off_at_max_seq_len(folder):
    messages = turns(*CONVERSATIONS["two turns"])
    full, cut = (tokenizer_of(folder, **options).tokenize_messages(messages) for options in ({}, {"max_seq_len": 9}))
    assert cut == (full[0][:9], full[1][:9])


def test_a_folder_without_a_template_gets_chatml(tmp_path):
    write_qwen3_tokenizer(tmp_path, WORDS, template=None)
    messages = turns(("who sings?", "a bird"))
    # torchtune main's way to name it
    tokenizer = qwen3_tokenizer(str(tmp_path / "vocab.json"), merges_file="merges.txt")
    text = tokenizer.decode(tokenizer.tokenize_messages(messages)[0], skip_special_tokens=False)
    answer = "<|im_start|>assistant\n<think>\n\n</think>\n\na bird<|im_end|>\n"
    assert text == "<|im_start|>user\nwho sings?<|im_end|>\n" + answer
    assert tokenizer.special_tokens["<think>"] == QWEN3_SPECIAL.index("<think>")


def test_missing_tokens_are_refused(tmp_path):
    write_qwen3_tokenizer(tmp_path, WORDS, special=["<|endoftext|>", "<|im_end|>"])
    with pytest.raises(UserError, match=r"tokenizer\.json lacks the special token <\|im_start\|>"):
        tokenizer_of(tmp_path)
    write_qwen3_tokenizer(tmp_path, WORDS, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    with pytest.raises(UserError, match="lacks the special token <think>"):  # which the template writes
        tokenizer_of(tmp_path)
    with pytest.raises(UserError, match="prompt_template"):
        tokenizer_of(tmp_path, prompt_template="x")


def test_system_and_tool_turns_are_context(folder):
    tokenizer = tokenizer_of(folder)
    messages = [
        Message(role="system", content="be brief", masked=True),
        Message(role="user", content="who sings?", masked=True),
        Message(role="ipython", content="the bird sings", masked=True),
        Message(role="assistant", content="ein Vögel \U0001f426"),
    ]
    text = tokenizer.decode(tokenizer.tokenize_messages(messages)[0], skip_special_tokens=False)
    assert "<|im_start|>system\nbe brief<|im_end|>" in text
    assert "<|im_start|>tool\nthe bird sings<|im_end|>" in text
    assert targets(tokenizer, messages) == "ein Vögel \U0001f426<|im_end|>"


def test_a_template_that_leaves_a_turn_out_is_refused(tmp_path):
    template = "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    write_qwen3_tokenizer(tmp_path, WORDS, template=template)
    messages = [Message(role="ipython", content="lost", masked=True), Message(role="assistant", content="x")]
    with pytest.raises(UserError, match="leaves out the text of a tool turn"):
        tokenizer_of(tmp_path).tokenize_messages(messages)


def test_template_dialect_is_transformers(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}<|im_start|>{{ m.role }}\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') }}"
        "{{ {'b': 1, 'a': 'ö'} | tojson(sort_keys=True, separators=(',', ':')) }}"
    )
    write_qwen3_tokenizer(tmp_path, WORDS, template=template)
    messages = turns(("who sings?", "a bird"))
    tokens = tokenizer_of(tmp_path).tokenize_messages(messages)[0]
    assert tokens == tokens_of_transformers(tmp_path, messages)


def test_named_templates(folder):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": config["chat_template"]}]
    expected = tokenizer_of(folder).tokenize_messages(turns(("a", "b")))
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert tokenizer_of(folder).tokenize_messages(turns(("a", "b"))) == expected
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named[:1]}))
    with pytest.raises(UserError, match="none named default"):
        tokenizer_of(folder)
