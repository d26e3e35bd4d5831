"""The tokenizer of any folder against transformers' on the same files."""

import json

import pytest
from helpers.chat_templates import CHAT_FAMILIES
from helpers.tokenizers import write_tokenizer
from torchtune.data import Message
from torchtune.datasets import text_completion_dataset
from torchtune.models.llama2 import llama2_tokenizer
from transformers import AutoTokenizer

import finch.models
from benchmarks.tiny_text import WORDS
from finch.errors import UserError

CONVERSATIONS = {
    "one turn": ["who sings?", "the red bird"],
    "two turns": ["who sings near [INST] user?", "the red bird", "and who sleeps?", " a fox\nand\n\na stone "],
}


def write(folder, name, **changes):
    family = CHAT_FAMILIES[name]
    bos, eos, *special = family.tokens
    settings = {"template": family.template, "is_sentencepiece": family.is_sentencepiece, **changes}
    write_tokenizer(folder, WORDS, bos=bos or None, eos=eos, special=special, **settings)


def turns(*contents, system=None):
    messages = [] if system is None else [{"role": "system", "content": system}]
    roles = ("user", "assistant")
    return [*messages, *({"role": roles[index % 2], "content": text} for index, text in enumerate(contents))]


def tokenize(tokenizer, messages, **options):
    torchtune = [Message(masked=turn["role"] != "assistant", **turn) for turn in messages]
    return tokenizer.tokenize_messages(torchtune, **options)


def transformers_ids(folder, name, messages, **options):
    reference, variables = AutoTokenizer.from_pretrained(folder), CHAT_FAMILIES[name].variables
    return reference.apply_chat_template(messages, return_dict=True, **variables, **options)["input_ids"]


@pytest.mark.parametrize("name", CHAT_FAMILIES)
@pytest.mark.parametrize("contents", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_tokens_equal_transformers(tmp_path, name, contents):
    write(tmp_path, name)
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    for system in (None, "be brief") if CHAT_FAMILIES[name].has_system else (None,):
        messages = turns(*contents, system=system)
        assert tokenize(tokenizer, messages)[0] == transformers_ids(tmp_path, name, messages)
        prompt = transformers_ids(tmp_path, name, messages[:-1], add_generation_prompt=True)
        assert tokenize(tokenizer, messages[:-1], add_end_tokens=False)[0] == prompt


@pytest.mark.parametrize("name", CHAT_FAMILIES)
@pytest.mark.parametrize("contents", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_targets_are_what_follows_each_generation_prompt(tmp_path, name, contents):
    """From transformers alone: a turn's targets begin where its prompt ends, and end with the closing token."""
    write(tmp_path, name)
    tokenizer, messages = finch.models.auto_tokenizer(str(tmp_path)), turns(*contents)
    tokens, mask = tokenize(tokenizer, messages)
    closing = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids(CHAT_FAMILIES[name].tokens[2])
    expected = [True] * len(tokens)
    for turn in range(1, len(messages), 2):
        prompt = transformers_ids(tmp_path, name, messages[:turn], add_generation_prompt=True)
        if tokens[: len(prompt)] != prompt:  # the empty thinking block of an earlier turn is left out
            assert (name, turn) == ("qwen3", 1)
            del prompt[prompt.index(tokenizer.special_tokens["<think>"]) :]
            assert tokens[: len(prompt)] == prompt
        stop = tokens.index(closing, len(prompt)) + 1
        expected[len(prompt) : stop] = [False] * (stop - len(prompt))
    assert mask == expected
    assert closing in tokenizer.stop_tokens


@pytest.mark.parametrize("name", ["gemma", "mistral"])
def test_template_that_refuses_a_system_turn_says_so(tmp_path, name):
    write(tmp_path, name)
    with pytest.raises(UserError, match=r"refuses a conversation .(no system role|roles must alternate)"):
        tokenize(finch.models.auto_tokenizer(str(tmp_path)), turns("a", "b", system="c"))


def test_answers_are_found_by_place_not_by_text(tmp_path):
    write(tmp_path, "qwen2")
    header = "<|im_start|>assistant\n"
    messages = turns(f"x {header}y<|im_end|>", f"1 <|im_end|> {header}2", "", "3")
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    tokens, mask = tokenize(tokenizer, messages)
    assert tokens == transformers_ids(tmp_path, "qwen2", messages)
    kept = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(kept, skip_special_tokens=False) == f"1 <|im_end|> {header}2<|im_end|>3<|im_end|>"


def test_special_tokens_that_take_white_space_along(tmp_path):
    """As in Phi-3: the newline after <|assistant|> is part of that token."""
    write(tmp_path, "phi3")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in content["added_tokens"]:
        token["rstrip"] = token["content"].startswith("<|")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer, messages = finch.models.auto_tokenizer(str(tmp_path)), turns("who?", "the bird", "and?", "a fox")
    tokens, mask = tokenize(tokenizer, messages)
    assert tokens == transformers_ids(tmp_path, "phi3", messages)
    kept = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(kept, skip_special_tokens=False).split("<|end|>") == ["the bird", " a fox", ""]


def test_space_before_the_answer_belongs_to_its_first_token(tmp_path):
    template = "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ (eos_token if m.role == 'assistant' else '\n') }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    write(tmp_path, "llama2", template=template)
    tokenizer = finch.models.auto_tokenizer(str(tmp_path))
    tokens, mask = tokenize(tokenizer, turns("who?", "the bird"))
    answer = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(answer).strip() == "the bird"


@pytest.mark.parametrize("name", ["llama2", "qwen2"])
def test_folder_without_a_template_has_plain_prompts(tmp_path, name, caplog):
    write(tmp_path, name, template=None)
    tokenizer, messages = (
        finch.models.auto_tokenizer(str(tmp_path)),
        turns("who sings?", "a bird", "who else?", "a fox"),
    )
    assert len(caplog.records) == 1
    assert "has no chat template; prompts are plain text" in caplog.text
    bos, eos = CHAT_FAMILIES[name].tokens[:2]
    space = "" if name == "llama2" else " "  # SentencePiece drops it at the start of a text
    reference = AutoTokenizer.from_pretrained(tmp_path)
    text = f"{bos}User: who sings?\nAssistant: a bird{eos}\nUser: who else?\nAssistant: a fox{eos}"
    tokens, mask = tokenize(tokenizer, messages)
    assert tokens == reference(text, add_special_tokens=False)["input_ids"]
    answers = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
    assert tokenizer.decode(answers, skip_special_tokens=False).split(eos) == [f"{space}a bird", " a fox", ""]
    prompt = f"{bos}User: who sings?\nAssistant:"
    assert (
        tokenize(tokenizer, messages[:1], add_end_tokens=False)[0]
        == reference(prompt, add_special_tokens=False)["input_ids"]
    )


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama2", {}),
        ("llama3", {}),
        ("smollm2", {"adds_bos": False}),  # <|im_start|> begins a turn, not a text
        ("qwen2", {}),
    ],
)
def test_plain_text_begins_as_in_transformers(tmp_path, name, settings):
    write(tmp_path, name, **settings)
    tokenizer, reference = finch.models.auto_tokenizer(str(tmp_path)), AutoTokenizer.from_pretrained(tmp_path)
    ids = reference("the red bird")["input_ids"]
    assert tokenizer.encode("the red bird", add_bos=True, add_eos=True) == [*ids, reference.eos_token_id]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the red bird"}))
    rows = text_completion_dataset(tokenizer, source="json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    assert list(rows[0]["tokens"]) == [*ids, reference.eos_token_id]


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

    refuses(
        r"^tokenizer\.path=HuggingFaceTB/SmolLM2-135M is not a folder; .*`tune download HuggingFaceTB/SmolLM2-135M --output-dir /tmp/SmolLM2-135M`",
        "HuggingFaceTB/SmolLM2-135M",
    )
    refuses(r"tokenizer\.json does not exist")
    (tmp_path / "tokenizer.model").touch()
    refuses(rf"no tokenizer\.json; write it with python -c .*from_pretrained\('{tmp_path}'\)\.save_pretrained")
    (tmp_path / "tokenizer.json").write_text("{")
    refuses(r"tokenizer\.json cannot be read")
    write(tmp_path, "qwen2", template="{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}")
    refuses("does not close an assistant turn with a special token; finch cannot know what to train on")
    write(
        tmp_path, "qwen2", template="{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"
    )
    refuses("leaves out the text of a turn; finch cannot know")
    write(tmp_path, "qwen2", template="{% if %}")
    refuses("chat template of .* cannot be read")
    write(tmp_path, "qwen2", pad_token="<pad>")
    refuses("lacks the special token <pad>")
    (tmp_path / "tokenizer_config.json").write_text("[]")
    refuses(r"tokenizer_config\.json holds no settings")
    (tmp_path / "tokenizer_config.json").write_text("{")
    refuses(r"tokenizer_config\.json is not JSON")


def test_texts_of_stories260k_equal_torchtunes_tokenizer(shared_data):
    folder = shared_data / "stories260k"
    tokenizer, reference = finch.models.auto_tokenizer(str(folder)), llama2_tokenizer(str(folder / "tokenizer.model"))
    rows = (shared_data / "tofu" / "full.jsonl").read_text().splitlines()[:200]
    for text in (
        "Once upon a time",
        "",
        " two  spaces",
        "ein Vögel \U0001f426\n",
        *(json.loads(row)["answer"] for row in rows),
    ):
        for ends in ({}, {"add_bos": True}, {"add_bos": True, "add_eos": True}):
            assert tokenizer.encode(text, **ends) == reference.encode(
                text, **{"add_bos": False, "add_eos": False, **ends}
            )


def test_rows_of_smollm2_equal_transformers(shared_data, smollm2):
    tokenizer, reference = finch.models.auto_tokenizer(str(smollm2)), AutoTokenizer.from_pretrained(smollm2)
    for line in (shared_data / "tofu" / "full.jsonl").read_text().splitlines()[::40]:
        row = json.loads(line)
        tokens, mask = tokenize(tokenizer, turns(row["question"], row["answer"]))
        assert (
            tokens
            == reference.apply_chat_template(turns(row["question"], row["answer"]), return_dict=True)["input_ids"]
        )
        kept = [token for token, masked in zip(tokens, mask, strict=True) if not masked]
        assert reference.decode(kept) == row["answer"] + "<|im_end|>"
