"""The study's rows, cut from a made-up data root with the real files' fields."""

import json
from collections import Counter

import pytest

from studies.smollm2_tofu.data import HUB, prepare

KINDS = (("", ""), ("paraphrased_", "other "))
TRAINING = ("train", "train_wrong", "train_blocks_0", "train_blocks_1", "train_blocks_2")


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def data_root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data_root")
    rows = {
        "tofu/forget10_perturbed.jsonl": [
            {f"{kind}{key}": f"{word}{key} {number}" for key in ("question", "answer") for kind, word in KINDS}
            | {"perturbed_answer": [f"wrong answer {number}.{choice}" for choice in range(5)]}
            for number in range(250)
        ],
        # every second prompt is too long
        "ifeval/prompts.jsonl": [
            {"key": number, "prompt": f"prompt {number}" + number % 2 * 400 * "x"} for number in range(200)
        ],
        "tinystories/stories.jsonl": [{"text": f" story {number} é" + 1000 * "x"} for number in range(120)],
        "hellaswag/validation.jsonl": [{"ctx": f"context {number}"} for number in range(310)],
        "winogrande/validation.jsonl": [{"sentence": f"sentence {number}"} for number in range(310)],
    }
    assert rows.keys() == HUB.keys()
    for name, lines in rows.items():
        (folder / name).parent.mkdir()
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture(scope="module")
def data(data_root, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    prepare(folder, data_root)
    return folder


def count(folder):
    return {str(path.relative_to(folder)): len(read(path)) for path in folder.rglob("*.jsonl")}


def test_numbers_of_rows(data):
    blocks = {f"train_blocks_{seed}.jsonl": 900 for seed in range(3)}
    learned = dict.fromkeys(("train", "train_wrong", "paraphrases", "tofu/forget10_perturbed"), 180)
    others = {"held_out": 20, "prompts": 64, "stories": 100}
    others |= {"hellaswag/validation": 300, "winogrande/validation": 300}
    assert count(data) == {**blocks, **{f"{name}.jsonl": number for name, number in (learned | others).items()}}


def test_quick_is_a_quarter(data, data_root, tmp_path):
    prepare(tmp_path, data_root, is_quick=True)
    assert count(tmp_path) == {name: number // 4 for name, number in count(data).items()}


def test_held_out_rows_are_never_trained_on(data):
    held_out = {row["question"].removeprefix("other ") for row in read(data / "held_out.jsonl")}
    assert len(held_out) == 20
    rows = [row for name in TRAINING for row in read(data / f"{name}.jsonl")]
    assert held_out.isdisjoint(row["question"] for row in rows)
    assert len(held_out | {row["question"] for row in rows}) == 200
    evaluated = read(data / "tofu/forget10_perturbed.jsonl")  # six choices, only of the learned rows
    assert [row["question"] for row in evaluated] == [row["question"] for row in read(data / "train.jsonl")]


def test_paraphrases_are_of_the_learned_rows(data):
    pairs = zip(read(data / "train.jsonl"), read(data / "paraphrases.jsonl"), strict=True)
    for row, paraphrase in pairs:
        assert paraphrase == {key: f"other {value}" for key, value in row.items()}


def test_a_tenth_of_wrong_is_wrong(data):
    pairs = zip(read(data / "train.jsonl"), read(data / "train_wrong.jsonl"), strict=True)
    changed = [(row, wrong) for row, wrong in pairs if row != wrong]
    assert len(changed) == 18
    for row, wrong in changed:
        assert wrong["question"] == row["question"]
        assert wrong["answer"].partition(".")[0] == f"wrong {row['answer']}"


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_blocks_have_their_rows_five_times(data, seed):
    train, rows = read(data / "train.jsonl"), read(data / f"train_blocks_{seed}.jsonl")
    for number in range(3):
        block = {row["question"] for row in train[60 * number : 60 * (number + 1)]}
        ordered = [row["question"] for row in rows[300 * number : 300 * (number + 1)]]
        assert Counter(ordered) == dict.fromkeys(block, 5)
        for start in range(0, 300, 60):  # one pass after the other
            assert set(ordered[start : start + 60]) == block
    assert {json.dumps(row) for row in rows} == {json.dumps(row) for row in train}
    assert rows != read(data / f"train_blocks_{(seed + 1) % 3}.jsonl")


def test_prompts_and_stories_are_short(data):
    prompts = [row["prompt"] for row in read(data / "prompts.jsonl")]
    assert prompts == [f"prompt {number}" for number in range(0, 128, 2)]
    stories = [row["text"] for row in read(data / "stories.jsonl")]
    assert {len(text) for text in stories} == {800}
    assert stories[7].startswith("story 7 éxxx")


def test_the_same_rows_every_time(data, data_root, tmp_path):
    prepare(tmp_path, data_root)
    for path in data.rglob("*.jsonl"):
        assert (tmp_path / path.relative_to(data)).read_bytes() == path.read_bytes()
