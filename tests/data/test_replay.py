"""Replayed rows: which a step has depends on seed and position only; their prompts are rendered as training renders them."""

import itertools
from collections import Counter

import pytest
import torch
from helpers.tokenizers import write_qwen3_tokenizer

from finch.data import prompts
from finch.data.order import GlobalOrder
from finch.data.replay import Replay
from finch.models.chat_tokenizer import auto_tokenizer

LENGTHS = torch.randint(20, 200, (41,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
SAMPLES = [{"tokens": [0] * (3 + row), "labels": [-100] * 3 + [0] * row} for row in range(1, 6)]


def dealt(order, steps, epoch=0, consumed=0, share=0.25):
    """Per step the replayed rows of all micro-batches; each with the step's number of replayed tokens."""
    replay = Replay(SAMPLES, share, seed=3)
    ranks = [list(replay.deal(order, steps, rank, epoch, consumed)) for rank in range(order.ranks)]
    found = []
    for start in range(consumed, order.samples_in(steps), order.global_batch):
        count = order.micro_batches_in_step(start)
        step = [each.pop(0) for each in ranks for _ in range(count)]
        rows = sorted(row for _, replayed, _ in step for row in replayed)
        assert {number for *_, number in step} == {sum(row + 1 for row in rows)}
        found.append(rows)
    return found


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["by rows", "by tokens"])
def test_steps_have_the_same_rows_on_every_layout_and_after_a_resume(lengths):
    one, two, four = (
        GlobalOrder(41, micro, accumulation, ranks, seed=1, lengths=lengths)
        for micro, accumulation, ranks in ((2, 4, 1), (2, 2, 2), (1, 2, 4))
    )
    epochs = [dealt(one, 6, epoch) for epoch in range(2)]
    assert [len(rows) for rows in epochs[0]] == [2, 2, 2, 2, 2, 1]  # the last step has one row of the task
    for order in (two, four):
        assert [dealt(order, 6, epoch) for epoch in range(2)] == epochs
    assert dealt(one, 6, 1, 16) == epochs[1][2:]
    counts = Counter(itertools.chain(*(rows for epoch in epochs for rows in epoch)))
    assert sorted(counts.values()) == [4, 4, 4, 5, 5]  # one permutation of the five rows after another


def test_replayed_rows_go_where_fewest_tokens_are():
    order = GlobalOrder(4, 2, 2, 1, shuffle=False, lengths=torch.tensor([100, 90, 10, 20]))
    replay = Replay(SAMPLES, 1.0, seed=0)
    dealt_rows = list(replay.deal(order, 1, 0, 0, 0))
    assert [task for task, *_ in dealt_rows] == list(order.micro_batches(0))
    loads = [
        sum(int(order.lengths[index]) for index in task) + sum(len(SAMPLES[row]["tokens"]) for row in own)
        for task, own, _ in dealt_rows
    ]
    assert max(loads) - min(loads) <= max(len(sample["tokens"]) for sample in SAMPLES)


@pytest.fixture
def folder(tmp_path):
    write_qwen3_tokenizer(tmp_path / "qwen", ["why", "does", "bread", "rise"])
    write_qwen3_tokenizer(tmp_path / "plain", ["why", "does"], template=None)
    return tmp_path


def test_a_model_writes_what_its_template_leaves_open(folder):
    """What comes before and after a user's text is what every rendered prompt has there."""
    tokenizer = auto_tokenizer(str(folder / "qwen"))
    own = prompts.own_prompts(tokenizer, 3)
    (rendered,) = prompts.tokenize_prompts(
        "key", "file", [{"prompt": "why does bread rise"}], tokenizer, limit=None, max_new_tokens=5
    )
    before, after = own.tokens[0], own.after
    assert len(own.tokens) == 3
    assert rendered[: len(before)] == before
    assert rendered[-len(after) :] == after
    assert tokenizer.decode(rendered[len(before) : -len(after)]) == "why does bread rise"
    assert tokenizer.decode(before, skip_special_tokens=False) == "<|im_start|>user\n"
    assert tokenizer.decode(after[:1], skip_special_tokens=False) == "<|im_end|>"


def test_a_conversation_is_its_turns_whatever_repeats_the_first(folder):
    turns = [{"role": "system", "content": "bread"}, {"role": "user", "content": "why"}]
    rows = [{"prompt": "why", "messages": [*turns, {"role": "assistant", "content": "does"}]}]
    tokenizer = auto_tokenizer(str(folder / "qwen"))
    (rendered,) = prompts.tokenize_prompts("key", "file", rows, tokenizer, limit=None, max_new_tokens=5)
    assert "system\nbread" in tokenizer.decode(rendered, skip_special_tokens=False)


def test_a_prompt_is_all_that_comes_before_the_rows_own_answer(folder):
    tokenizer = auto_tokenizer(str(folder / "qwen"))
    said = [
        {"role": role, "content": text} for role, text in (("user", "why"), ("assistant", "does"), ("user", "rise"))
    ]
    rows = [
        {"instruction": "why", "context": "bread", "response": "does"},
        {"prompt": "rise", "history": [["why", "does"]]},
        {"prompt": said, "completion": [{"role": "assistant", "content": "bread"}]},
        {"messages": [*said, {"role": "assistant", "content": "bread"}]},  # of a conversation the first turn
    ]
    rendered = prompts.tokenize_prompts("key", "file", rows, tokenizer, limit=None, max_new_tokens=5)
    texts = [tokenizer.decode(tokens).replace("\n", " ").split() for tokens in rendered]
    assert texts == [
        ["user", "why", "bread", "assistant"],
        *[["user", "why", "assistant", "does", "user", "rise", "assistant"]] * 2,
        ["user", "why", "assistant"],
    ]


def test_without_a_template_a_text_begins_with_bos(folder):
    tokenizer = auto_tokenizer(str(folder / "plain"))
    assert tokenizer.bos_id is None
    assert prompts.own_prompts(tokenizer, 2) == prompts.Prompts([[tokenizer.eos_id]] * 2)


def test_prompts_are_read_from_lines_of_text(tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeffWhy?\n\n  How? \nWhen?\u2028Now?\n", encoding="utf-8")
    assert prompts.load_rows(str(tmp_path / "prompts.txt"), None, None, "train", 2) == [
        {"prompt": "Why?"},
        {"prompt": "How?"},
    ]
    assert prompts.load_rows(str(tmp_path / "prompts.txt"), None, None, "train", 3)[2] == {"prompt": "When?\u2028Now?"}
