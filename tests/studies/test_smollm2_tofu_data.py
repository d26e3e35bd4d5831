"""The study's rows, cut from a made-up data root with the real files' fields."""

import json
import re
import shutil
from collections import Counter

import pytest

from studies.smollm2_tofu.data import HUB, prepare, prepare_equations

KINDS = (("", ""), ("paraphrased_", "other "))
TRAINING = ("train", "train_wrong", *(f"train_{kind}_{seed}" for kind in ("blocks", "300") for seed in range(3)))


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
        "tofu/full.jsonl": [{"question": f"full {number}", "answer": f"answer {number}"} for number in range(3700)],
        # every second prompt is too long
        "ifeval/prompts.jsonl": [
            {"key": number, "prompt": f"prompt {number}" + number % 2 * 400 * "x"} for number in range(200)
        ],
        "tinystories/stories.jsonl": [{"text": f" story {number} é" + 1000 * "x"} for number in range(400)],
        "hellaswag/validation.jsonl": [{"ctx": f"context {number}"} for number in range(310)],
        "winogrande/validation.jsonl": [{"sentence": f"sentence {number}"} for number in range(310)],
        "sciknoweval/chemistry_l3.jsonl": [
            {
                "prompt": {"default": "Balance."},
                "question": f"H2 + O2 = H2O ({number})",
                "answer": f"2H2 + O2 = 2H2O ({number})",
                "details": {"subtask": number % 2 * "balancing_chemical_equation"},
            }
            for number in range(600)
        ],
    }
    assert rows.keys() == HUB.keys()
    for name, lines in rows.items():
        (folder / name).parent.mkdir(exist_ok=True)
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
    orders = {
        f"train_{name}_{seed}.jsonl": rows for name, rows in (("blocks", 900), ("300", 4800)) for seed in range(3)
    }
    learned = dict.fromkeys(("train", "train_wrong", "paraphrases", "tofu/forget10_perturbed"), 180)
    others = {"held_out": 20, "prompts": 64, "stories": 100, "openings": 64, "train_3600": 3600, "skills": 468}
    others |= {"hellaswag/validation": 300, "winogrande/validation": 300}
    assert count(data) == {**orders, **{f"{name}.jsonl": number for name, number in (learned | others).items()}}


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
def test_long_runs_have_every_row_once_before_any_twice_as_often(data, seed):
    train, rows = (Counter(map(json.dumps, read(data / f"{name}.jsonl"))) for name in ("train", f"train_300_{seed}"))
    assert rows.keys() == train.keys()
    assert set(rows.values()) == {26, 27}
    rows = read(data / f"train_300_{seed}.jsonl")
    assert Counter(map(json.dumps, rows[180:360])) == train
    assert rows[:180] != rows[180:360]
    assert rows != read(data / f"train_300_{(seed + 1) % 3}.jsonl")


def test_many_rows_have_those_that_are_measured(data):
    rows = [row["question"] for row in read(data / "train_3600.jsonl")]
    assert len(set(rows)) == 3600
    assert {row["question"] for row in read(data / "train.jsonl")} < set(rows)


def test_openings_are_of_stories_that_are_not_measured(data):
    openings = [row["prompt"] for row in read(data / "openings.jsonl")]
    assert [opening.split()[:2] for opening in openings] == [["story", str(number)] for number in range(300, 364)]


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


def test_the_same_rows_every_time_in_files_that_stay_as_old_as_they_are(data, data_root, tmp_path):
    prepare(tmp_path, data_root)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.jsonl")}
    for path in files:
        assert path.read_bytes() == (data / path.relative_to(tmp_path)).read_bytes()
    prepare(tmp_path, data_root)
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_equations_are_learned_or_measured(data, data_root, tmp_path):
    shutil.copytree(data, tmp_path, dirs_exist_ok=True)
    prepare_equations(tmp_path, data_root)
    folder = tmp_path / "equations"
    train, others = read(folder / "train.jsonl"), read(folder / "held_out.jsonl")
    assert (len(train), len(others)) == (180, 120)
    assert len({row["question"] for row in train + others}) == 300
    assert all(row["question"].startswith("Balance.\n\nH2 + O2 = H2O") for row in train)
    for row, other in zip(read(folder / "tofu/forget10_perturbed.jsonl"), others, strict=True):
        assert (row["paraphrased_question"], row["paraphrased_answer"]) == (other["question"], other["answer"])
        assert len(set(row["perturbed_answer"])) == 5
        right = coefficients(other["answer"])
        for wrong in map(coefficients, row["perturbed_answer"]):
            assert sum(one != two for one, two in zip(wrong, right, strict=True)) == 1
    assert (folder / "prompts.jsonl").read_bytes() == (data / "prompts.jsonl").read_bytes()


def coefficients(equation):
    return [int(each or 1) for each in re.findall(r"(?:^| )(\d*)[HO]", equation)]
