"""`finch chat`: both answers are transformers' greedy ones on the folders; adapters are merged; mistakes are one line."""

import io
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.runs import LORA, LORA_MODEL, finch
from omegaconf import OmegaConf
from rich.console import Console
from torchtune.config import instantiate
from torchtune.data import Message
from transformers import AutoModelForCausalLM

from finch.base.errors import UserError
from finch.data.prompts import stop_tokens, user_prompt
from finch.evaluation.chat import Chat, talk

PROMPT = "what colour is the bird"
OPTIONS = {"max_new_tokens": 6, "temperature": 0.0}


@pytest.fixture
def run(tiny, trained):
    return trained(tiny()).folder


def greedy(folder, run):
    """transformers' answer."""
    tokenizer = instantiate(OmegaConf.load(run / "config.yaml").tokenizer)
    prompt, ends = torch.tensor([user_prompt(PROMPT, tokenizer)]), stop_tokens(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=6, eos_token_id=ends, pad_token_id=ends[0])
    return tokenizer.decode([token for token in tokens[0, prompt.shape[1] :].tolist() if token not in ends]).strip()


def test_answers_are_those_of_transformers(run, base_folder, capsys, monkeypatch):
    chat = Chat(run, None, **OPTIONS)
    base, tuned = chat.answers(PROMPT)
    assert (base, tuned) == (greedy(base_folder, run), greedy(run / "epoch_0", run))
    assert base != tuned
    with pytest.raises(UserError, match=r"the prompt has \d+ tokens, the context \d+; give a shorter one"):
        chat.answers("bird " * 500)
    typed = iter([PROMPT, ""])
    out = io.StringIO()
    console = Console(file=out, width=80)
    monkeypatch.setattr(console, "input", lambda _: next(typed))
    talk(chat, None, console)
    typed_text, _, table = out.getvalue().partition("\n")  # shown where the input is no terminal, which has it already
    assert typed_text.split() == ["prompt>", *PROMPT.split()]
    assert "tuned (epoch_0)" in table
    code, text, _ = finch(capsys, "chat", str(run), "--prompt", PROMPT, "--max-new-tokens", "6")
    assert code == 0
    assert text.split() == table.split()


def test_turns_are_kept_until_they_are_cleared(run, base_folder, monkeypatch):
    chat = Chat(run, None, **OPTIONS)
    asked: list = []

    def answers(prompt, before):
        found = Chat.answers(chat, prompt, before)
        asked.append((prompt, [list(turns) for turns in before]))
        return found

    console = Console(file=io.StringIO(), width=80)
    typed = iter([PROMPT, "bird " * 500, "and the sea", "/clear", "and the sea", ""])
    monkeypatch.setattr(console, "input", lambda _: next(typed))
    talk(SimpleNamespace(answers=answers, tuned="epoch_0"), None, console)
    assert "give a shorter one, or type /clear" in " ".join(console.file.getvalue().split())  # and the chat goes on
    first = [greedy(base_folder, run), greedy(run / "epoch_0", run)]
    assert asked == [
        (PROMPT, [[], []]),
        ("and the sea", [[PROMPT, first[0]], [PROMPT, first[1]]]),
        ("and the sea", [[], []]),
    ]
    tokenizer = instantiate(OmegaConf.load(run / "config.yaml").tokenizer)
    turns = [Message(role="user", content=PROMPT), Message(role="assistant", content=first[1])]
    turns += [Message(role="user", content="and the sea"), Message(role="assistant", content="a bird")]
    rendered, prompt = tokenizer({"messages": turns})["tokens"], user_prompt("and the sea", tokenizer, asked[1][1][1])
    assert prompt == rendered[: len(prompt)]
    assert tokenizer.decode(rendered[len(prompt) :]).split() == ["a", "bird"]


@pytest.mark.parametrize("value", ["-1", "inf", "nan"])
def test_temperature_is_a_number(capsys, value):
    code, _, err = finch(capsys, "chat", "/nowhere", "--temperature", value)
    assert (code, f"{value} must be 0 or a number above it" in err) == (2, True), err


def test_an_empty_prompt_is_named(capsys):
    code, out, err = finch(capsys, "chat", "/nowhere", "--prompt", " ")
    assert (code, out) == (1, "")
    assert "finch: error: --prompt is empty; give a text, or leave it out for a conversation" in err


def test_control_characters_are_shown_escaped(capsys):
    class Model:
        tuned = "average"

        def answers(self, *_):
            return "a\x1b[2J\x9b1m\u202eb", "c\nd\ue000\u200d"

    talk(Model(), "p", Console(width=80))
    text = capsys.readouterr().out
    assert r"a\x1b[2J\x9b1m\u202eb" in text
    assert "d\ue000\u200d" in text


def test_the_models_name_is_shown_as_it_is(capsys):
    model = SimpleNamespace(answers=lambda prompt, before: ["a", "b"], tuned="\x1b]0;x\x07[red]c[/d]")
    talk(model, "p", Console(width=80))
    assert r"tuned (\x1b]0;x\x07[red]c[/d])" in capsys.readouterr().out


def test_adapter_is_merged_and_the_base_may_have_moved(tiny, trained, base_folder, tmp_path, capsys):
    config = tiny(model=LORA_MODEL)
    full = trained(config, recipe=LORA).folder
    moved = tmp_path / "moved"
    shutil.copytree(base_folder, moved)
    run = tmp_path / "run"
    shutil.copytree(trained(config, "save_adapter_weights_only=True", recipe=LORA).folder, run, symlinks=True)
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(base_folder), "/gone"))
    code, _, error = finch(capsys, "chat", str(run), "--prompt", PROMPT)
    assert code == 1
    assert "finch: error: /gone, which" in error
    assert "give the one it has moved to with --base DIR" in error
    assert Chat(run, moved, **OPTIONS).answers(PROMPT) == Chat(full, None, **OPTIONS).answers(PROMPT)


def test_an_average_is_asked_as_its_run(run, tmp_path):
    (tmp_path / "run/average").mkdir(parents=True)
    shutil.copy(run / "config.yaml", tmp_path / "run")
    shutil.copytree(run / "epoch_0", tmp_path / "run/average/model")
    expected = Chat(run, None, **OPTIONS).answers(PROMPT)
    for folder in (tmp_path / "run", tmp_path / "run/average"):  # the run has no other model
        chat = Chat(folder, None, **OPTIONS)
        assert (chat.answers(PROMPT), chat.tuned) == (expected, "average")
    shutil.copytree(run / "epoch_0", tmp_path / "run/epoch_1")  # the run has gone on
    (tmp_path / "run/epoch_1/config.json").touch()
    assert Chat(tmp_path / "run", None, **OPTIONS).tuned == "epoch_1"
    assert Chat(run / "epoch_0", None, **OPTIONS).answers(PROMPT) == expected
