"""SciKnowEval's rows: the split of all rows, the prompt, and the target, which is a solution where a row has one."""

from functools import partial

import datasets
import pytest
from helpers import rows as rows_helper
from helpers.rows import membership
from torchtune.data import Message

from finch.base.errors import UserError
from finch.data.stats import collect_stats
from finch.evaluation.datasets.sciknoweval import (
    choices_of,
    sciknoweval_dataset,
    sciknoweval_solutions_dataset,
    to_question_answer,
)

FIELDS = ("prompt", "question", "choices", "answerKey", "answer")
CHOICES = {"text": ["a tree", "a river", "the bird", "a"], "label": ["A", "B", "C", "D"]}
PARTS = ("train", "validation", "test")
NO_CHOICES = {"text": [], "label": []}


def row(number, **changes):
    """A multiple-choice row; every fourth has no choices."""
    is_text = number % 4 == 0
    fields = {"prompt": {"default": "the bird"}, "question": f"the tree {number}", "answer": "a" if is_text else ""}
    fields |= {"choices": NO_CHOICES if is_text else CHOICES, "answerKey": "" if is_text else "C"}
    fields |= {"type": "filling" if is_text else "mcq-4-choices", "domain": "Chemistry", "details": {"level": "L3"}}
    return fields | changes


ROWS = [row(number) for number in range(40)]


@pytest.fixture
def load(tokenizer, write):
    return lambda *rows, **arguments: sciknoweval_dataset(tokenizer, data_files=write(*rows), **arguments)


def questions(data):
    return [row["question"] for row in data._data]


def test_all_rows_are_split_whatever_their_order(load):
    parts = {part: questions(load(*ROWS, part=part)) for part in PARTS}
    assert {part: len(rows) for part, rows in parts.items()} == {"train": 28, "validation": 2, "test": 10}
    assert sorted(row for rows in parts.values() for row in rows) == sorted(questions(load(*ROWS, part="all")))
    solved = [{**row, "solution": "a river"} for row in reversed(ROWS)]  # a solution does not count
    assert parts == {part: questions(load(*solved, part=part)) for part in parts}


def test_membership_of_the_real_rows_is_pinned(shared_data, tokenizer):
    file = str(shared_data / "sciknoweval" / "chemistry_l3.jsonl")
    data = {part: sciknoweval_dataset(tokenizer, data_files=file, part=part) for part in PARTS}
    assert {part: len(rows) for part, rows in data.items()} == {"train": 1680, "validation": 120, "test": 600}
    assert sum(bool(choices_of(row)) for row in data["test"]._data) == 527  # the rows that are scored
    pinned = {"train": "024a8c5b0d19a360", "validation": "0d13bf38eab96e8e", "test": "163fd6dc8da66733"}
    assert {part: membership(questions(rows)) for part, rows in data.items()} == pinned


def test_prompt_and_plain_answer():
    convert = partial(to_question_answer, {field: field for field in FIELDS})
    question = "the bird\n\nthe tree 1\nA. a tree\nB. a river\nC. the bird\nD. a"
    assert convert(row(1)) == {"question": question, "answer": "C. the bird"}
    assert convert(row(4)) == {"question": "the bird\n\nthe tree 4", "answer": "a"}
    assert convert(row(4, prompt=None))["question"] == "the tree 4"


def test_solution_is_the_target_where_there_is_one(load, tokenizer, caplog):
    rows = [row(1, solution="a river"), row(2, solution=None), row(4, solution="")]
    with caplog.at_level("INFO", logger="finch"):
        data = load(*rows, part="all")
    assert "3 rows, targets are 1 solutions and 2 plain answers (1 letters with their choice, 1 texts)" in caplog.text
    expected = [tokenizer.encode(text, add_bos=False) for text in ("a river", "C. the bird", "a")]
    assert [[label for label in data[index]["labels"] if label != -100] for index in range(3)] == expected


def test_columns_of_other_names(load):
    renamed = [{"Frage" if key == "question" else key: value for key, value in row.items()} for row in ROWS]
    data = load(*renamed, column_map={"question": "Frage"}, part="test")
    assert [row["Frage"] for row in data._data] == questions(load(*ROWS, part="test"))
    assert data[0]["tokens"] == load(*ROWS, part="test")[0]["tokens"]


def test_hub_rows_are_filtered_by_domain_and_level(monkeypatch, tokenizer):
    others = [row(1, domain="Biology"), row(2, details={"level": "L1"})]
    table, calls = datasets.Dataset.from_list([*others, *ROWS]), []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: calls.append((args, kwargs)) or table)
    data = sciknoweval_dataset(tokenizer, part="all")
    assert calls == [(("hicai-zju/SciKnowEval", "v2"), {"split": "test", "data_files": None})]
    assert questions(data) == [row["question"] for row in ROWS]
    assert data.origin(0) == (None, 3)
    assert len(sciknoweval_dataset(tokenizer, part="all", domain=None, level=None)) == 42


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"question": ""}, "its field 'question' is missing or null"),
        ({"answerKey": "E"}, "its field 'answerKey' is 'E', none of its choices A, B, C, D"),
        ({"choices": {"text": ["a"], "label": ["A", "B"]}}, "its field 'choices' has 1 texts and 2 labels"),
        ({"choices": None}, "it has neither 'choices' nor an 'answer'"),
    ],
)
def test_bad_row_has_its_number_and_a_reason(tokenizer, write, changes, message):
    file = write(*ROWS[:7], row(7, **changes), *ROWS[8:])
    component = "finch.data.sciknoweval.sciknoweval_dataset"
    parts = [rows_helper.load(tokenizer, file, _component_=component, source=None, part=part) for part in PARTS]
    bad = [entry for samples in parts for entry in collect_stats(samples, 0, 1).bad.items()]
    assert [(reason, *map(str, rows.first)) for reason, rows in bad] == [(message, f"row 8 of {file}")]


def solution(question, answer="a river"):
    """As in the public file: the system's turn says how to answer, the user's has the question, its choices and a request."""
    user = {"role": "user", "content": f"{question}\nA: a tree\nB: a river\nthe bird"}
    return {"messages": [{"role": "system", "content": "the"}, user], "output_text": answer}


@pytest.fixture
def load_solutions(tokenizer, write, tmp_path):
    """An Arrow file, as the datasets library saves it."""
    questions = write(*ROWS, name="questions.jsonl")

    def load(*rows, **arguments):
        datasets.Dataset.from_list(list(rows)).save_to_disk(tmp_path / "solutions")
        files = str(tmp_path / "solutions" / "*.arrow")
        return sciknoweval_solutions_dataset(tokenizer, data_files=files, questions=questions, **arguments)

    return load


def test_solutions_belong_to_the_parts_of_their_questions(load, load_solutions, tokenizer, caplog):
    solved = [solution(f"the  tree\n{number}") for number in (*range(40), 17)]  # "the tree 1" is in "the tree 17"
    others = [solution("who sleeps?"), {"messages": [{"role": "system", "content": "the tree 1"}], "output_text": "a"}]
    for part in (*PARTS, "all"):
        asked = questions(load(*ROWS, part=part))
        with caplog.at_level("INFO", logger="finch"):
            data = load_solutions(*solved, *others, part=part)
        found = [" ".join(row["messages"][1]["content"].split()[:3]) for row in data._data]
        assert sorted(found) == sorted([*asked, *["the tree 17"] * ("the tree 17" in asked)])
        assert f"{part}: {len(found)} of 43 solutions; 2 are to none of its 40 questions" in caplog.text
    assert data.origin(3) == (None, 4)


def test_a_solution_is_the_target_of_its_own_prompt(load_solutions, tokenizer):
    [sample] = load_solutions(solution("the tree 1", "the fox"), part="all")
    target = [label for label in sample["labels"] if label != -100]
    assert target == tokenizer.encode("the fox", add_bos=False)
    turns = [Message(**turn) for turn in solution("the tree 1")["messages"]]
    prompt = tokenizer.tokenize_messages(turns, add_end_tokens=False)[0]
    assert list(sample["tokens"])[: len(prompt)] == prompt


def test_solutions_without_a_part_or_a_field_are_refused(load_solutions):
    with pytest.raises(UserError, match=r"solutions/\*\.arrow has no solution to a question of part=train; check"):
        load_solutions(solution("who sleeps?"))
    with pytest.raises(
        UserError, match="the rows have no field 'output_text'; solutions have messages and output_text"
    ):
        load_solutions({"messages": solution("the tree 1")["messages"]})


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (ROWS, {"part": "tests"}, "part=tests must be all, train, validation or test"),
        (ROWS, {"level": "L4"}, "domain=Chemistry dataset.level=L4 has no rows; the rows are of Chemistry L3"),
        (ROWS, {"column_map": {"solutions": "x"}}, "column_map.solutions: rows of SciKnowEval have no such field"),
        (ROWS, {"column_map": {"solution": "x"}}, "the rows have no field 'x', as SciKnowEval's have"),
        ([{"question": "a", "answer": "b"}], {"domain": None, "level": None}, "have no field 'choices'"),
        ([{key: value for key, value in ROWS[1].items() if key != "details"}], {}, "level=L3 needs rows with a field"),
    ],
)
def test_invalid_arguments_raise(load, rows, arguments, message):
    with pytest.raises(UserError, match=message) as raised:
        load(*rows, **arguments)
    assert "\n" not in str(raised.value)
