"""The templates that TRL ships, on 24 conversations, with thinking on and off, with and without tools: ids are transformers', targets are what
follows the generation prompt, and where TRL has a training template, those of its mask."""

import re
from pathlib import Path

import pytest
import trl
from helpers.tokenizers import write_tokenizer
from transformers import AutoTokenizer

import finch.models
from benchmarks.tiny_text import WORDS
from finch.base.errors import UserError
from finch.data.formats import ChatMessage

FOLDER = Path(trl.__file__).parent / "chat_templates"
BAR = "\uff5c"  # DeepSeek's
TOKEN = re.compile(rf"<[{BAR}|]?[A-Za-z_▁:/][^<>\s'\"{{}}]{{0,40}}[|{BAR}]?>|\[/?[A-Z_]{{3,20}}\]")
FAST = {"qwen3", "qwen3_training", "qwen3_5_think", "llama3_2", "llama3_training", "gemma3", "phi3_training"}
OTHERS = {  # no texts, or no token that ends an answer
    *("smolvlm", "smolvlm_training", "idefics3", "idefics3_training", "llava_next", "llava_next_training"),
    *("glm4moe",),
}
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
TEMPLATES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]


def user(text):
    return {"role": "user", "content": text}


def answer(text, **fields):
    return {"role": "assistant", "content": text, **fields}


CALL = {"tool_calls": [{"type": "function", "function": {"name": "find_bird", "arguments": {"name": "red", "n": 2}}}]}
TOOLS = [{"type": "function", "function": {"name": "find_bird", "description": "Finds.", "parameters": {
    "type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]}}}]  # fmt: skip
FOUND = {"role": "tool", "content": "a bird", "name": "find_bird"}
SYSTEM = {"role": "system", "content": "be brief"}
CONVERSATIONS = {
    "one": [user("who sings?"), answer("the red bird")],
    "two": [user("who sings?"), answer("the red bird"), user("and?"), answer("a fox")],
    "three": [user("a"), answer("b"), user("c"), answer("d"), user("e"), answer("f")],
    "system": [SYSTEM, user("who?"), answer("the bird")],
    "system, two": [SYSTEM, user("who?"), answer("the bird"), user("x"), answer("y")],
    "spaces": [user(" who? "), answer(" a fox\nand\n\na stone ")],
    "empty": [user("who?"), answer("")],
    "words of the header": [user("assistant"), answer("user: assistant")],
    "one text": [user("a"), answer("a"), user("a"), answer("a")],
    "thinking": [user("2+2"), answer("<think>\nTwo and two.\n</think>\n\n4")],
    "thinking, one line break": [user("2+2"), answer("<think>\nTwo and two.\n</think>\n4")],
    "thinking, no line break": [user("2+2"), answer("<think>Two and two.</think>4")],
    "thinking, empty": [user("2+2"), answer("<think>\n\n</think>\n\n4")],
    "thinking, closed only": [user("2+2"), answer("Two and two.\n</think>\n\n4")],
    "thinking, both": [
        user("2+2"), answer("<think>\nTwo.\n</think>\n\n4"), user("3+3"), answer("<think>\nThree.\n</think>\n\n6")],
    "thinking, the first": [user("2+2"), answer("<think>\nTwo.\n</think>\n\n4"), user("3+3"), answer("6")],
    "reasoning": [user("2+2"), answer("4", reasoning_content="Two and two.")],
    "reasoning, both": [
        user("2+2"), answer("4", reasoning_content="Two."), user("3+3"), answer("6", reasoning_content="Three.")],
    "call": [user("find it"), answer(None, **CALL), FOUND, answer("there it is")],
    "call, text": [user("find it"), answer("I look", **CALL), FOUND, answer("there it is")],
    "call, last": [user("find it"), answer("", **CALL)],
    "calls": [user("find it"), answer(None, tool_calls=2 * CALL["tool_calls"]), FOUND, FOUND, answer("there")],
    "call, then more": [user("find it"), answer(None, **CALL), FOUND, answer("there"), user("more"), answer("no")],
    "call, reasoning": [
        user("find it"), answer(None, **CALL, reasoning_content="Look."), FOUND, answer("there", reasoning_content="Seen.")],
}  # fmt: skip


def messages_of(turns):
    return [
        ChatMessage(
            role="ipython" if turn["role"] == "tool" else turn["role"],
            content=turn["content"] or "",
            masked=turn["role"] != "assistant",
            fields={key: value for key, value in turn.items() if key != "role" and not (key == "content" and value)},
        )
        for turn in turns
    ]


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes a tokenizer that has the special tokens of all templates, with one of them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    sources = {name: (FOLDER / f"{name}.jinja").read_text(encoding="utf-8") for name in NAMES}
    tokens = dict.fromkeys(token for source in sources.values() for token in TOKEN.findall(source))
    special = [token for token in tokens if token not in ("<bos>", "<eos>")]
    write_tokenizer(folder, WORDS, bos="<bos>", eos="<eos>", special=special, template="{{ messages }}")

    def write_template(name):
        (folder / "chat_template.jinja").write_text(sources[name], encoding="utf-8")
        return folder, sources[name]

    return write_template


PROMPT_OR_END = re.compile(
    rf"<think>(\s*</think>)?|\s|<\|start\|>assistant|<{BAR}Assistant{BAR}>|<{BAR}tool▁outputs▁end{BAR}>|<\|end\|>|<eos>"
)
"""What TRL's masks have and finch's targets have not: a part of the generation prompt, or what follows the closing token."""
EXTRA = re.compile(r"(<\|tool_response>|(<\|turn>)?model\n)*")
"""What a turn of Gemma's goes on with after a call; TRL's masks leave it to the program that answers the call."""
REFUSED = re.compile("leaves out|in the same way")


def thoughts(turns):
    """What each answer was thought to be."""
    within = (turn["content"].rpartition("</think>")[0].rpartition("<think>")[2] for turn in turns if turn["content"])
    return [*(turn["reasoning_content"] for turn in turns if "reasoning_content" in turn), *map(str.strip, within)]


def tokenize(tokenizer, turns, tools):
    """Ids and mask, or why there are none."""
    try:
        return tokenizer.tokenize_messages(messages_of(turns), tools=tools)
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_targets(write, name):
    folder, source = write(name)
    reference = AutoTokenizer.from_pretrained(folder)
    if name in OTHERS:
        with pytest.raises(UserError, match="tokenizer: its chat template"):
            finch.models.auto_tokenizer(str(folder))
        return
    num_equal = num_refused = 0
    for thinking in (False, True):
        tokenizer = finch.models.auto_tokenizer(str(folder), thinking=thinking)

        def ids(turns, tokenizer=tokenizer, thinking=thinking, **options):
            return reference.apply_chat_template(turns, return_dict=True, enable_thinking=thinking, **options)

        for label, turns in CONVERSATIONS.items():
            for tools in (None, TOOLS):
                where = (name, thinking, label, bool(tools))
                try:
                    expected = ids(turns, tools=tools, return_assistant_tokens_mask="{% generation" in source)
                except Exception:  # jinja's, of a template that does not take such a conversation
                    expected = None
                found = tokenize(tokenizer, turns, tools)
                if isinstance(found, str):  # also what transformers renders without a part of the conversation
                    assert expected is None or REFUSED.search(found), (*where, found)
                    if "leaves out the thinking" in found:
                        text = reference.decode(expected["input_ids"])
                        assert any(thought not in text for thought in thoughts(turns)), where
                        num_refused += 1
                    continue
                assert expected is not None, where
                tokens, mask = found
                assert tokens == expected["input_ids"], where
                num_equal += 1
                prompt = ids(turns[:-1], tools=tools, add_generation_prompt=True)["input_ids"]
                if tokens[: len(prompt)] == prompt:
                    assert mask[len(prompt) - 1], where
                    assert not mask[len(prompt)], where
                    # A model that knows the row by heart writes on from the prompt until a token ends its answer; Cohere's templates end it by two,
                    # and what ends a call hands over to the tool.
                    if not turns[-1].get("tool_calls"):
                        is_end = [*(token in tokenizer.stop_tokens for token in tokens[len(prompt) :]), False]
                        end = is_end.index(True)
                        learned = is_end.index(False, end)
                        assert not any(mask[len(prompt) : len(prompt) + learned]), where
                        assert all(mask[len(prompt) + learned :]), where
                if "assistant_masks" in expected:
                    pairs = list(zip(tokens, mask, expected["assistant_masks"], strict=True))
                    extra = [token for token, masked, in_mask in pairs if not masked and not in_mask]
                    assert EXTRA.fullmatch(tokenizer.decode(extra, skip_special_tokens=False)), where
                    less = [token for token, masked, in_mask in pairs if masked and in_mask]
                    text = tokenizer.decode(less, skip_special_tokens=False)
                    assert not PROMPT_OR_END.sub("", text), (*where, text)
    assert num_equal + num_refused >= 28  # of 96: some templates take no system turn, no tools and no thinking
