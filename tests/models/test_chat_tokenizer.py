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
    tokenizer = qwen3_tokenizer(str(folder / "tokenizer.json"), thinking=thinking)
    reference = AutoTokenizer.from_pretrained(folder)
    messages = turns(*pairs)
    plain = [{"role": message.role, "content": message.text_content} for message in messages]
    expected = reference.apply_chat_template(plain, enable_thinking=thinking, return_dict=True)["input_ids"]
    assert tokenizer.tokenize_messages(messages)[0] == expected
    prompt = reference.apply_chat_template(
        plain[:-1], enable_thinking=thinking, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert tokenizer.tokenize_messages(messages[:-1], add_end_tokens=False)[0] == prompt


@pytest.mark.parametrize("pairs", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_targets_are_what_the_model_must_write(folder, pairs):
    tokenizer = qwen3_tokenizer(str(folder / "tokenizer.json"))
    tokens, mask = tokenizer.tokenize_messages(turns(*pairs))
    written = tokenizer.decode(
        [token for token, masked in zip(tokens, mask, strict=True) if not masked], skip_special_tokens=False
    )
    assert written == "".join(answer + "<|im_end|>" for _, answer in pairs)
    # With thinking off the last answer begins right where a generation prompt of transformers ends.
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": pairs[0][0]}], enable_thinking=False, add_generation_prompt=True, tokenize=False
    )
    if len(pairs) == 1:
        assert tokenizer.decode(tokens[: mask.index(False)], skip_special_tokens=False) == prompt


def test_train_on_input_has_no_mask(folder):
    _, mask = qwen3_tokenizer(str(folder / "tokenizer.json")).tokenize_messages(turns(("a", "b"), masked=False))
    assert not any(mask)


def test_cut_off_at_max_seq_len(folder):
    full = qwen3_tokenizer(str(folder / "tokenizer.json")).tokenize_messages(turns(*CONVERSATIONS["two turns"]))
    cut = qwen3_tokenizer(str(folder / "tokenizer.json"), max_seq_len=9).tokenize_messages(
        turns(*CONVERSATIONS["two turns"])
    )
    assert cut == (full[0][:9], full[1][:9])


def test_a_folder_without_a_template_gets_chatml(tmp_path):
    write_qwen3_tokenizer(tmp_path, WORDS, template=None)
    messages = turns(("who sings?", "a bird"))
    tokenizer = qwen3_tokenizer(
        str(tmp_path / "vocab.json"), merges_file="merges.txt"
    )  # torchtune main's way to name it
    text = tokenizer.decode(tokenizer.tokenize_messages(messages)[0], skip_special_tokens=False)
    assert (
        text
        == "<|im_start|>user\nwho sings?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\na bird<|im_end|>\n"
    )
    assert tokenizer.special_tokens["<think>"] == QWEN3_SPECIAL.index("<think>")


def test_missing_files_and_tokens_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json"))
    write_qwen3_tokenizer(tmp_path, WORDS, special=["<|endoftext|>", "<|im_end|>"])
    with pytest.raises(UserError, match=r"tokenizer\.json lacks the special token <\|im_start\|>"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="prompt_template"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json"), prompt_template="x")


def test_template_that_hides_the_answer_is_refused(tmp_path):
    write_qwen3_tokenizer(tmp_path, WORDS, template="{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(UserError, match="cannot tell what to train on"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json")).tokenize_messages(turns(("a", "b")))
    write_qwen3_tokenizer(tmp_path, WORDS, template="{{ raise_exception('no system turn') }}")
    with pytest.raises(UserError, match=r"refuses a conversation .no system turn"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json")).tokenize_messages(turns(("a", "b")))


def test_a_literal_closing_token_in_an_answer_stays_a_target(folder):
    tokenizer = qwen3_tokenizer(str(folder / "tokenizer.json"))
    tokens, mask = tokenizer.tokenize_messages(turns(("a", "write <|im_end|> here"), ("b", "yes")))
    written = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(written, skip_special_tokens=False) == "write <|im_end|> here<|im_end|>yes<|im_end|>"


def test_system_and_tool_turns_are_context(tmp_path):
    write_qwen3_tokenizer(tmp_path, WORDS)
    tokenizer = qwen3_tokenizer(str(tmp_path / "tokenizer.json"))
    messages = [
        Message(role="system", content="be brief", masked=True),
        Message(role="user", content="who sings?", masked=True),
        Message(role="ipython", content="the bird sings", masked=True),
        Message(role="assistant", content="ein Vögel \U0001f426"),
    ]
    tokens, mask = tokenizer.tokenize_messages(messages)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert "<|im_start|>system\nbe brief<|im_end|>" in text
    assert "<|im_start|>tool\nthe bird sings<|im_end|>" in text
    written = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(written, skip_special_tokens=False) == "ein Vögel \U0001f426<|im_end|>"


def test_a_template_that_leaves_a_turn_out_is_refused(tmp_path):
    template = "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    write_qwen3_tokenizer(tmp_path, WORDS, template=template)
    messages = [Message(role="ipython", content="lost", masked=True), Message(role="assistant", content="x")]
    with pytest.raises(UserError, match="leaves out the text of a tool turn"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json")).tokenize_messages(messages)


def test_template_dialect_is_transformers(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}<|im_start|>{{ m.role }}\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') }}"
        "{{ {'b': 1, 'a': 'ö'} | tojson(sort_keys=True, separators=(',', ':')) }}"
    )
    write_qwen3_tokenizer(tmp_path, WORDS, template=template)
    messages = turns(("who sings?", "a bird"))
    tokens = qwen3_tokenizer(str(tmp_path / "tokenizer.json")).tokenize_messages(messages)[0]
    plain = [{"role": message.role, "content": message.text_content} for message in messages]
    reference = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(plain, return_dict=True)["input_ids"]
    assert tokens == reference


def test_named_templates(tmp_path):
    write_qwen3_tokenizer(tmp_path, WORDS)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": config["chat_template"]}]
    expected = qwen3_tokenizer(str(tmp_path / "tokenizer.json")).tokenize_messages(turns(("a", "b")))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert qwen3_tokenizer(str(tmp_path / "tokenizer.json")).tokenize_messages(turns(("a", "b"))) == expected
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named[:1]}))
    with pytest.raises(UserError, match="none named default"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json"))


def test_thinking_tokens_that_the_template_writes_must_exist(tmp_path):
    write_qwen3_tokenizer(tmp_path, WORDS, special=["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    with pytest.raises(UserError, match="lacks the special token <think>"):
        qwen3_tokenizer(str(tmp_path / "tokenizer.json"))
