"""The tokenizer of any folder, and Qwen3's own, against transformers' on the same files."""

import datetime
import json
import re
import signal
import time

import pytest
from helpers.chat_templates import CHAT_FAMILIES
from helpers.rows import write_lines
from helpers.tokenizers import write_tokenizer
from torchtune.data import Message
from torchtune.datasets import text_completion_dataset
from torchtune.models.llama2 import llama2_tokenizer
from transformers import AutoTokenizer

import finch.models
from benchmarks.tiny_text import WORDS
from finch.base.errors import UserError
from finch.data.dataset import Samples
from finch.data.formats import ChatMessage
from finch.data.rows import rows_dataset
from finch.models import chat_environment
from finch.models.qwen3 import qwen3_tokenizer

CONVERSATIONS = {
    "one turn": ["who sings?", "the red bird"],
    "two turns": ["who sings near [INST] user?", "the red bird", "and who sleeps?", " a fox\nand\n\na stone "],
}


def write(folder, name, **changes):
    family = CHAT_FAMILIES[name]
    bos, eos, *special = family.tokens
    settings = {"bos": bos or None, "eos": eos, "special": special, "template": family.template, **changes}
    write_tokenizer(folder, WORDS, is_sentencepiece=family.is_sentencepiece, **settings)


def turns(*contents, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*messages, *({"role": roles[index % 2], "content": text} for index, text in enumerate(contents))]


def tokenize(tokenizer, messages, **options):
    torchtune = [Message(masked=turn["role"] != "assistant", **turn) for turn in messages]
    return tokenizer.tokenize_messages(torchtune, **options)


def targets(tokenizer, messages):
    """The tokens, and the text of those that are trained on."""
    tokens, mask = tokenize(tokenizer, messages)
    kept = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    return tokens, tokenizer.decode(kept, skip_special_tokens=False)


def transformers_ids(folder, messages, **options):
    reference, options = AutoTokenizer.from_pretrained(folder), {"enable_thinking": False, **options}
    return reference.apply_chat_template(messages, return_dict=True, **options)["input_ids"]


@pytest.mark.parametrize("name", ["llama2", "mistral"])
@pytest.mark.parametrize("contents", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_tokens_and_targets_equal_transformers(tmp_path, name, contents):
    """Families that TRL ships no template of, see test_published_templates; targets from transformers alone: a turn's begin where its prompt
    ends, and end with the closing token."""
    write(tmp_path, name)
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    for system in ("be brief", None) if name == "llama2" else (None,):
        messages = turns(*contents, system=system)
        tokens, mask = tokenize(tokenizer, messages)
        assert tokens == transformers_ids(tmp_path, messages)
    assert tokenizer.eos_id in tokenizer.stop_tokens
    expected = [True] * len(tokens)
    for turn in range(1, len(messages), 2):
        prompt = transformers_ids(tmp_path, messages[:turn], add_generation_prompt=True)
        assert tokenize(tokenizer, messages[:turn], add_end_tokens=False)[0] == prompt == tokens[: len(prompt)]
        stop = tokens.index(tokenizer.eos_id, len(prompt)) + 1
        expected[len(prompt) : stop] = [False] * (stop - len(prompt))
    assert mask == expected


def test_template_that_refuses_a_system_turn_says_so(tmp_path):
    write(tmp_path, "mistral")
    with pytest.raises(UserError, match=r"refuses a conversation .roles must alternate"):
        tokenize(finch.models.auto_tokenizer(str(tmp_path)), turns("a", "b", system="c"))


def test_answers_are_found_by_place_not_by_text(tmp_path):
    write(tmp_path, "qwen2")
    header = "<|im_start|>assistant\n"
    messages = turns(f"x {header}y<|im_end|>", f"1 <|im_end|> {header}2", "", "3")
    tokens, text = targets(finch.models.auto_tokenizer(str(tmp_path)), messages)
    assert tokens == transformers_ids(tmp_path, messages)
    assert text == f"1 <|im_end|> {header}2<|im_end|>3<|im_end|>"


def test_special_tokens_that_take_white_space_along(tmp_path):
    """As in Phi-3: the newline after <|assistant|> is part of that token."""
    write(tmp_path, "phi3")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"].startswith("<|")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    messages = turns("who?", "the bird", "and?", "a fox")
    tokens, text = targets(finch.models.auto_tokenizer(str(tmp_path)), messages)
    assert tokens == transformers_ids(tmp_path, messages)
    assert text.split("<|end|>") == ["the bird", " a fox", ""]


def test_space_before_the_answer_belongs_to_its_first_token(tmp_path):
    template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ (eos_token if m.role == 'assistant' else '\n') }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    write(tmp_path, "llama2", template=template)
    _, text = targets(finch.models.auto_tokenizer(str(tmp_path)), turns("who?", "the bird"))
    assert text.strip() == "the bird</s>"


@pytest.mark.parametrize("name", ["llama2", "qwen2"])
def test_folder_without_a_template_has_plain_prompts(tmp_path, name, caplog):
    write(tmp_path, name, template=None)
    tokenizer, messages = finch.models.auto_tokenizer(str(tmp_path)), turns("who?", "a bird", "who else?", "a fox")
    assert len(caplog.records) == 1
    assert "has no chat template; prompts are plain text" in caplog.text
    bos, eos = CHAT_FAMILIES[name].tokens[:2]
    space = "" if name == "llama2" else " "  # SentencePiece drops it at the start of a text
    reference = AutoTokenizer.from_pretrained(tmp_path)
    texts = (
        f"{bos}User: who?\nAssistant: a bird{eos}\nUser: who else?\nAssistant: a fox{eos}",
        f"{bos}User: who?\nAssistant:",
    )
    expected, prompt = reference(list(texts), add_special_tokens=False)["input_ids"]
    tokens, text = targets(tokenizer, messages)
    assert tokens == expected
    assert text.split(eos) == [f"{space}a bird", " a fox", ""]
    assert tokenize(tokenizer, messages[:1], add_end_tokens=False)[0] == prompt


@pytest.mark.parametrize("style", ["chat", "authors"])
@pytest.mark.parametrize(
    ("name", "changes"), [("llama2", {"template": None}), ("qwen2", {"template": None}), ("qwen2", {}), ("qwen3", {})]
)
def test_transformers_renders_the_trained_template_alike(tmp_path, name, changes, style):
    """Without the variables that finch gives: a BOS that no text gets, thinking, the system turn."""
    write(tmp_path, name, **changes)
    tokenizer = finch.models.auto_tokenizer(str(tmp_path), prompt_style=style)
    messages = turns("who?", "a bird", "and?", "a fox")
    expected = [tokenize(tokenizer, messages)[0], tokenize(tokenizer, messages[:1], add_end_tokens=False)[0]]
    (tmp_path / "chat_template.jinja").write_text(tokenizer.chat_template)
    reference = AutoTokenizer.from_pretrained(tmp_path)
    rendered = [
        reference.apply_chat_template(given, return_dict=True, add_generation_prompt=given[-1]["role"] == "user")
        for given in (messages, messages[:1])
    ]
    assert [each["input_ids"] for each in rendered] == expected
    again = finch.models.auto_tokenizer(str(tmp_path), prompt_style=style)
    assert (again.chat_template, tokenize(again, messages)[0]) == (tokenizer.chat_template, expected[0])


@pytest.mark.parametrize("name", ["llama2", "llama3", "smollm2", "qwen2"])
def test_plain_text_begins_as_in_transformers(tmp_path, name):
    write(tmp_path, name, adds_bos=name != "smollm2")  # there <|im_start|> begins a turn, not a text
    tokenizer, reference = finch.models.auto_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the red bird"}))
    rows = text_completion_dataset(tokenizer, source="json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    assert list(rows[0]["tokens"]) == [*reference("the red bird")["input_ids"], reference.eos_token_id]


def test_special_tokens_come_from_any_of_their_files(tmp_path):
    write(tmp_path, "llama3", pad_token="<|start_header_id|>")
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    assert tokenizer.pad_id == tokenizer.special_tokens["<|start_header_id|>"]
    expected = tokenize(tokenizer, turns("a", "b"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    older = {key: {"content": config.pop(key), "lstrip": False} for key in ("bos_token", "eos_token")}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    (tmp_path / "chat_template.jinja").write_text(config.pop("chat_template"))
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    assert tokenize(tokenizer, turns("a", "b")) == expected
    assert tokenizer.pad_id == tokenizer.eos_id == tokenizer.special_tokens["<|eos|>"]
    (tmp_path / "special_tokens_map.json").unlink()
    with pytest.raises(UserError, match=r"names no eos_token; name it in tokenizer_config\.json"):
        finch.models.auto_tokenizer(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [tokenizer.eos_id, 5]}))
    assert finch.models.auto_tokenizer(str(tmp_path)).eos_id == tokenizer.eos_id


def test_broken_and_missing_files_are_refused(tmp_path):
    def refuses(message, path=tmp_path):
        with pytest.raises(UserError, match=message) as error:
            finch.models.auto_tokenizer(str(path))
        assert "\n" not in str(error.value)

    refuses("^tokenizer.path=HuggingFaceTB/SmolLM2-135M is not a folder", "HuggingFaceTB/SmolLM2-135M")
    refuses(r"tokenizer\.json does not exist")
    (tmp_path / "tokenizer.model").touch()
    refuses(r"no tokenizer\.json; write it there: python -c .*from_pretrained\('\.'\)\.save_pretrained")
    (tmp_path / "tokenizer.json").write_text("{")
    refuses(r"tokenizer\.json cannot be read")
    for changes, message in (
        ({"template": "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"}, "does not close an assistant turn with a special token; finch cannot know what to train on"),
        ({"template": "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"}, "leaves out the text of a turn; finch cannot know"),
        ({"template": "{% if %}"}, "chat template of .* cannot be read"),
        ({"pad_token": "<pad>"}, "lacks the special token <pad>"),
    ):  # fmt: skip
        write(tmp_path, "qwen2", **changes)
        refuses(message)
    for content, message in (("[]", "holds no settings"), ("{", "is not JSON")):
        (tmp_path / "tokenizer_config.json").write_text(content)
        refuses(rf"tokenizer_config\.json {message}")


def test_texts_of_stories260k_equal_torchtunes_tokenizer(shared_data):
    folder = shared_data / "stories260k"
    tokenizer, reference = finch.models.auto_tokenizer(str(folder)), llama2_tokenizer(str(folder / "tokenizer.model"))
    rows = (shared_data / "tofu" / "full.jsonl").read_text().splitlines()[:200]
    texts = ("Once upon a time", "", " two  spaces", "ein Vögel \U0001f426\n")
    for text in (*texts, *(json.loads(row)["answer"] for row in rows)):
        for bos, eos in ((False, False), (True, False), (True, True)):
            ends = {"add_bos": bos, "add_eos": eos}
            assert tokenizer.encode(text, **ends) == reference.encode(text, **ends)


# Qwen3's own tokenizer function


def qwen3_of(folder, **options):
    return qwen3_tokenizer(str(folder / "tokenizer.json"), **options)


def test_train_on_input_has_no_mask(tmp_path):
    write(tmp_path, "qwen3")
    messages = [Message(role="user", content="a"), Message(role="assistant", content="b")]
    assert not any(qwen3_of(tmp_path).tokenize_messages(messages)[1])


@pytest.mark.parametrize("content", ["a small bird ", "s", "system", ""])
def test_train_on_input_leaves_out_a_system_turn_that_is_no_target(tmp_path, content):
    """Also one whose text is in its header as well."""
    write(tmp_path, "qwen3")
    system = Message(role="system", content=content, masked=True)
    tokenizer = qwen3_of(tmp_path)
    tokens, mask = tokenizer.tokenize_messages(
        [system, Message(role="user", content="a"), Message(role="assistant", content="b")]
    )
    learned = [token for token, is_masked in zip(tokens, mask, strict=True) if not is_masked]
    text = tokenizer.decode(learned, skip_special_tokens=False)
    assert text.replace(" ", "").startswith("<|im_end|>\n<|im_start|>user\na<|im_end|>"), text
    assert mask.index(False) == len(mask) - len(learned)


def test_cut_off_at_max_seq_len(tmp_path):
    write(tmp_path, "qwen3")
    messages = turns(*CONVERSATIONS["two turns"])
    full, cut = (tokenize(qwen3_of(tmp_path, **options), messages) for options in ({}, {"max_seq_len": 9}))
    assert cut == (full[0][:9], full[1][:9])


def test_a_qwen3_folder_without_a_template_gets_chatml(tmp_path):
    write(tmp_path, "qwen3", template=None)
    tokenizer = qwen3_tokenizer(str(tmp_path / "vocab.json"), merges_file="merges.txt")  # as torchtune main names it
    tokens, _ = tokenize(tokenizer, turns("who sings?", "a bird"))
    answer = "<|im_start|>assistant\n<think>\n\n</think>\n\na bird<|im_end|>\n"
    assert tokenizer.decode(tokens, skip_special_tokens=False) == f"<|im_start|>user\nwho sings?<|im_end|>\n{answer}"


def test_missing_tokens_are_refused(tmp_path):
    special = ["<|endoftext|>"]
    for token in ("<|im_start|>", "<think>"):  # which the template writes
        write(tmp_path, "qwen3", special=special)
        with pytest.raises(UserError, match=rf"tokenizer\.json lacks the special token {re.escape(token)}"):
            qwen3_of(tmp_path)
        special.append(token)
    with pytest.raises(UserError, match="prompt_template"):
        qwen3_of(tmp_path, prompt_template="x")


def test_a_template_that_leaves_a_turn_out_is_refused(tmp_path):
    template = "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    write(tmp_path, "qwen3", template=template)
    with pytest.raises(UserError, match="leaves out the text of a tool turn"):
        tokenize(qwen3_of(tmp_path), [{"role": "ipython", "content": "lost"}, *turns("a", "x")])


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{{ 'a' if j > 10**8 }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for i in range(10**9) %}a{% endfor %}", "OverflowError"),
        ("{{ 'a' * 10**10 }}", "MemoryError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ " + "(" * 3000, "RecursionError"),
        pytest.param(ENDLESS, "signal", marks=pytest.mark.slow),
    ],
)
def test_a_template_that_takes_too_much_is_refused(tmp_path, template, reason):
    write(tmp_path, "qwen3", template=template)
    with pytest.raises(UserError, match=rf"^tokenizer: the chat template of {tmp_path} does not end well \(.*{reason}"):
        qwen3_of(tmp_path)


def test_a_template_that_is_endless_for_some_rows_only_is_stopped(tmp_path, monkeypatch):
    """The row is named; the rows after it do not take as long again. No timer is left."""
    monkeypatch.setattr(chat_environment, "CPU_SECONDS", 0.5)
    template = f"{CHAT_FAMILIES['qwen3'].template}{{% if messages[0].content == 'a bird' %}}{ENDLESS}{{% endif %}}"
    write(tmp_path, "qwen3", template=template)
    rows = [{"question": text, "answer": "x"} for text in ("a fox", "a bird", *["a fox"] * 50)]
    file = write_lines(tmp_path / "rows.jsonl", *rows)
    start = time.process_time()
    data = rows_dataset(qwen3_of(tmp_path), data_files=str(file))
    data.tokenize("dataset")
    assert time.process_time() - start < 20
    assert len(data[0]["tokens"]) > 4
    message = "tokenizer: its chat template does not end well (a row took 5 s)"
    for index in (1, 51):
        assert data.tokenized.error(index) == message
    with pytest.raises(UserError) as error:
        Samples(data, "dataset", str(file))[1]
    assert str(error.value) == f"dataset: row 2 of {file} cannot be used ({message}); fix or remove that row"
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_template_dialect_is_transformers(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}<|im_start|>{{ m.role }}\n"
        "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}\n{% endfor %}{{ strftime_now('%Y') }}"
        "{{ {'b': 1, 'a': 'ö'} | tojson(sort_keys=True, separators=(',', ':')) }}"
    )
    write(tmp_path, "qwen3", template=template)
    messages = turns("who sings?", "a bird")
    assert tokenize(qwen3_of(tmp_path), messages)[0] == transformers_ids(tmp_path, messages)


def test_named_templates(tmp_path):
    write(tmp_path, "qwen3")
    expected = tokenize(qwen3_of(tmp_path), turns("a", "b"))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": config["chat_template"]}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert tokenize(qwen3_of(tmp_path), turns("a", "b")) == expected
    for others in (named[:1], [3, {"name": "default"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": others}))
        with pytest.raises(UserError, match="none named default"):
            qwen3_of(tmp_path)


@pytest.mark.parametrize("in_files", [False, True])
def test_rows_with_tools_have_the_template_named_for_them(tmp_path, in_files):
    write(tmp_path, "qwen3")
    file, messages = tmp_path / "tokenizer_config.json", turns("who sings?", "a bird")
    config = json.loads(file.read_text())
    default = config.pop("chat_template")
    texts = {"default": f"{default}\n", "tool_use": f"\n{{{{ tools | tojson }}}}\n{default}\n\n"}
    if in_files:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "chat_template.jinja").write_text(texts["default"])
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
    else:
        config["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
    file.write_text(json.dumps(config))
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    tools = [{"type": "function", "function": {"name": "sing", "parameters": {}}}]
    found = [tokenize(tokenizer, messages, tools=each)[0] for each in (None, tools)]
    assert found == [transformers_ids(tmp_path, messages, tools=each) for each in (None, tools)]
    assert found[0] != found[1]


def test_what_a_tokenizer_file_keeps_of_an_earlier_call_does_not_count(tmp_path):
    write(tmp_path, "qwen3")
    messages = turns("who sings?", "the red bird sings and the fox sleeps under the old tree")
    expected = transformers_ids(tmp_path, messages)
    file = tmp_path / "tokenizer.json"
    for state in (
        {"truncation": {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}},
        {"padding": {"strategy": {"Fixed": 128}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}},
    ):  # fmt: skip
        file.write_text(json.dumps({**json.loads(file.read_text()), **state}))
        tokenizer = finch.models.auto_tokenizer(str(tmp_path))
        assert tokenize(tokenizer, messages)[0] == expected == transformers_ids(tmp_path, messages)
        assert len(tokenizer.encode("the red bird sings")) == len(
            AutoTokenizer.from_pretrained(tmp_path)("the red bird sings")["input_ids"]
        )


def test_many_conversations_are_tokenized_like_single_ones(tmp_path):
    write(tmp_path, "mistral")
    tokenizer = finch.models.auto_tokenizer(str(tmp_path), max_seq_len=30)
    conversations = [turns("who?", "a bird", "and?", " a fox "), turns("a", "b", system="c"), turns("\U0001f426", "")]
    samples = [
        {"messages": [Message(masked=turn["role"] != "assistant", **turn) for turn in each]} for each in conversations
    ]
    first, refused, last = tokenizer.tokenize_many(samples)
    assert [first, last] == [tokenize(tokenizer, conversations[index]) for index in (0, 2)]
    assert "refuses a conversation" in str(refused)


def test_a_template_that_writes_the_date_writes_that_of_the_run(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    write(tmp_path, "qwen3", template=template)
    texts = {}
    for date in ("2024-07-26", None):
        tokenizer = finch.models.auto_tokenizer(str(tmp_path), date=date)
        texts[tokenizer.date] = tokenizer.decode(tokenize(tokenizer, turns("a", "b"))[0])
        assert tokenizer.date == (date or str(datetime.date.today()))
    assert [text.split("\n")[0] for text in texts.values()] == [
        "26 Jul 2024",
        datetime.date.today().strftime("%d %b %Y"),
    ]
    with pytest.raises(UserError, match=r"tokenizer\.date=26 Jul must be a day such as"):
        finch.models.auto_tokenizer(str(tmp_path), date="26 Jul")
    write(tmp_path, "qwen3")
    assert finch.models.auto_tokenizer(str(tmp_path)).date is None


def test_arguments_in_a_string_are_written_as_the_object_that_they_hold(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}"
    write(tmp_path, "qwen3", template=template)
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    for arguments in ('{"a": 2}', {"a": 2}):
        call = {"tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
        answer = ChatMessage(role="assistant", content="", fields=call)
        tokens, mask = tokenizer.tokenize_messages([Message(role="user", content="a", masked=True), answer])
        kept = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
        assert tokenizer.decode(kept, skip_special_tokens=False).endswith('add {"a": 2}<|im_end|>')
    call["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(UserError, match="the arguments of its call of add are not JSON"):
        tokenizer.tokenize_messages([Message(role="user", content="a", masked=True), answer])


def test_arguments_in_a_string_stay_one_where_the_template_writes_it_as_it_is(tmp_path):
    """As in transformers; an object would be written in Python's form."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments }}{% endfor %}<|im_end|>{% endfor %}"
    write(tmp_path, "qwen3", template=template)
    call = {"function": {"name": "add", "arguments": '{"a": true}'}}
    messages = [turns("a")[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    answer = ChatMessage(role="assistant", content="", fields={"tool_calls": [call]})
    tokens, _ = finch.models.auto_tokenizer(str(tmp_path)).tokenize_messages(
        [Message(role="user", content="a", masked=True), answer]
    )
    assert tokens == transformers_ids(tmp_path, messages)


CALLS = "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments }}{% endfor %}"


@pytest.mark.parametrize(
    ("calls", "tools", "missing"),
    [
        (CALLS, "{{ tools }}", None),
        (CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]"), "{{ tools }}", "a tool call"),
        (CALLS, "{{ tools if messages[0].role == 'system' }}", "the tools"),
    ],
)
def test_a_call_or_a_tool_that_is_left_out_is_noticed_where_another_has_its_name(tmp_path, calls, tools, missing):
    template = f"{tools}{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{calls}<|im_end|>{{% endfor %}}"
    write(tmp_path, "qwen3", template=template)
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    made = [{"function": {"name": "add", "arguments": f"{{{number}}}"}} for number in range(2)]
    answer = ChatMessage(role="assistant", content="", fields={"tool_calls": made})
    messages, given = [Message(role="user", content="add", masked=True), answer], [{"function": {"name": "add"}}]
    if missing is None:
        assert tokenizer.tokenize_messages(messages, tools=given)
        return
    with pytest.raises(UserError, match=f"its chat template leaves out {missing}"):
        tokenizer.tokenize_messages(messages, tools=given)


THOUGHT, FIELD = (
    {"content": "<think>\n two and two\n</think>4"},
    {"content": "4", "reasoning_content": " two and two\n"},
)
PLAIN = {"content": "two and two"}  # which is what the others' thinking is


@pytest.mark.parametrize("is_learned", [True, False])
@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        ([THOUGHT, PLAIN], "an answer before the last turn"),
        ([FIELD, PLAIN], "an answer before the last turn"),
        ([{"content": "4", "thinking": "two and two"}, THOUGHT], "an answer before the last turn"),
        ([PLAIN, FIELD], None),
        ([PLAIN, THOUGHT], None),
        ([THOUGHT, None], "an answer before the last turn"),
        ([{"content": "", **THOUGHT, "reasoning_content": "other"}], None),
        ([{"content": "4", "reasoning": {"effort": "high"}}], "dict, not text"),
        ([THOUGHT, {"content": "So <think>two and two</think>4"}, PLAIN], "a text before it"),
    ],
)
def test_thinking_that_the_template_leaves_out_is_refused_where_the_answer_is_learned(
    tmp_path, answers, missing, is_learned
):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content | trim }}\n</think>\n{% endif %}"
        "{{ m.content if loop.last else m.content.split('</think>') | last }}<|im_end|>\n{% endfor %}"
    )
    write(tmp_path, "qwen3", template=template)
    tokenizer, messages = finch.models.auto_tokenizer(str(tmp_path)), []
    for answer in answers:
        messages.append(Message(role="user", content="2+2", masked=True))
        if answer is not None:
            fields = {key: value for key, value in answer.items() if key != "content"}
            options = {"content": answer["content"], "masked": not is_learned}
            messages.append(ChatMessage(role="assistant", fields=fields, **options))
    if missing is None or not is_learned:
        assert any(not masked for masked in tokenizer.tokenize_messages(messages)[1]) == is_learned
        return
    with pytest.raises(UserError, match=rf"thinking of .*{missing}"):
        tokenizer.tokenize_messages(messages)
    assert tokenizer.tokenize_messages(messages, add_end_tokens=False)  # as history


@pytest.mark.parametrize("has_calls", [True, False])
def test_fields_that_a_template_names_but_does_not_write_are_not_read(tmp_path, has_calls):
    """``name`` of a call, and a variable ``thinking``; also where the template refuses calls."""
    calls = (
        "{% for c in m.tool_calls or [] %}{{ c.name }}{% endfor %}"
        if has_calls
        else "{{ raise_exception('no') if m.tool_calls }}"
    )
    template = (
        "{% set thinking = m and m.name %}{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' ~ m.note if m.note }}\n{{ m.content }}"
        f"{calls}<|im_end|>{{% endfor %}}{{{{ tools }}}}"
    )
    write(tmp_path, "qwen3", template=template)
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    fields = ("name", "thinking", "note", "id", "tool_calls", "tools")
    assert [field for field in fields if tokenizer.reads(field)] == ["note", "tool_calls", "tools"]


def test_a_template_that_drops_the_last_answers_thinking_is_refused(tmp_path):
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>') | last }}<|im_end|>{% endfor %}"
    write(tmp_path, "qwen3", template=template)
    tokenizer, thinking = finch.models.auto_tokenizer(str(tmp_path)), "<think>two and two</think>4"
    with pytest.raises(UserError, match="leaves out the thinking of the last answer"):
        tokenize(tokenizer, turns("a", thinking))


def test_a_prompt_that_no_row_has_is_named(tmp_path, caplog):
    """As DeepSeek's distilled models have it: generation starts within thinking, which is left out of answers."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    write(tmp_path, "qwen3", template=template)
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    assert "the tuned model is asked from another prompt than it learned" in caplog.text
    assert targets(tokenizer, turns("a", "b"))[1] == "b<|im_end|>"
    assert targets(tokenizer, turns("a", "<think>\nc\n</think>\n\nb"))[1] == "c\n</think>\n\nb<|im_end|>"
