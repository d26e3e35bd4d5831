"""Which rows a task has, in which form, and what is said where they are absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.known_answer_model import KnownAnswerModel, evaluate, load
from helpers.rows import write_lines
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.evaluation.datasets.sciknoweval import prompt_of
from finch.evaluation.harness import task_manager
from finch.evaluation.model_folders import training_questions
from finch.evaluation.results import NEW, OLD, RELIABILITY
from finch.evaluation.tasks import lm_eval_tasks, tofu
from finch.evaluation.tasks.registry import ALL, SUITES, TASKS
from finch.evaluation.tasks.task import shuffled


def training_rows(folder: Path, name: str, file: Path, **arguments: str) -> frozenset[str]:
    """The questions that a run on a task's rows trains on."""
    config = {"_component_": f"finch.data.{name}.{name}_dataset", "data_files": str(file), **arguments}
    OmegaConf.save(OmegaConf.create({"dataset": config}), folder / "config.yaml")
    questions = training_questions(folder)
    assert questions is not None
    return questions


def documents(name: str, data_root: Path, has_chat_template: bool = True) -> list[dict[str, Any]]:
    return list(next(iter(load(name, data_root, has_chat_template).values())).eval_docs)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_suites_have_one_role() -> None:
    roles = {suite: {TASKS[name].role for name in SUITES[suite]} for suite in ALL}
    assert roles == {"forgetting": {OLD}, "reliability": {RELIABILITY}, **{name: {NEW} for name in ALL[2:]}}


def test_definition_names_the_prompt() -> None:
    assert TASKS["tofu"].definition(True).endswith("chat template")
    assert "plain prompt" in TASKS["tofu"].definition(False)
    for name in ("hellaswag", "winogrande", "mmlu", "truthfulqa"):
        assert TASKS[name].definition(True) == TASKS[name].definition(False)
        assert TASKS[name].definition(True).endswith("no chat template")


@pytest.mark.parametrize("name", TASKS)
def test_absent_rows_are_an_error_with_the_command(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        TASKS[name].check_data(tmp_path)
    source = TASKS[name].sources[0]
    assert str(tmp_path / source.file) in str(error.value)
    assert f"load_dataset('{source.hub}'" in str(error.value)
    assert "\n" not in str(error.value)
    TASKS[name].check_data(None)


def test_row_without_a_field_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tofu").mkdir()
    write_lines(tmp_path / "tofu" / "forget10_perturbed.jsonl", {"question": "Who?", "answer": "Me."})
    with pytest.raises(UserError, match="row 1 has no field 'paraphrased_question', only question, answer; each row"):
        tofu.dataset(str(tmp_path))


def test_hellaswag_needs_one_form_of_the_context(tmp_path: Path) -> None:
    (tmp_path / "hellaswag").mkdir()
    parts = {"ctx_a": "A woman sings.", "ctx_b": "she"}
    for row, found in (({"ctx": "A woman sings. she"}, parts), (parts, parts)):
        write_lines(
            tmp_path / "hellaswag" / "validation.jsonl",
            {"activity_label": "", "endings": ["a"] * 4, "label": "0", **row},
        )
        [document] = lm_eval_tasks.hellaswag_dataset(str(tmp_path))["validation"]
        assert {key: document[key] for key in parts} == found
    write_lines(tmp_path / "hellaswag" / "validation.jsonl", {"activity_label": "", "endings": [], "label": "0"})
    with pytest.raises(
        UserError, match="a row has neither ctx_a and ctx_b nor ctx, only activity_label, endings, label"
    ):
        lm_eval_tasks.hellaswag_dataset(str(tmp_path))


def test_mmlu_needs_all_subjects(tmp_path: Path) -> None:
    (tmp_path / "mmlu").mkdir()
    row = {"question": "Which?", "choices": ["a", "b", "c", "d"], "answer": 0, "subject": "anatomy"}
    for split in ("dev", "test"):
        write_lines(tmp_path / "mmlu" / f"{split}.jsonl", row)
    task_manager(tmp_path, True).load(["mmlu_anatomy"])
    with pytest.raises(UserError, match="no rows of the subject virology"):
        task_manager(tmp_path, True).load(["mmlu_virology"])


def test_manager_adds_a_users_tasks(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("task: own\ndataset_path: json\n")
    assert "own" in task_manager(None, True, tmp_path).all_tasks
    assert "own" not in task_manager(None, True).all_tasks
    names = {name for task in TASKS.values() for name in task.lm_eval_names}
    assert names <= set(task_manager(None, True).all_tasks)
    assert names <= set(task_manager(tmp_path, False).all_tasks)


def test_shuffled_is_a_uniform_permutation() -> None:
    orders = [shuffled(6, f"row {index}") for index in range(6000)]
    assert all(sorted(order) == list(range(6)) for order in orders)
    for position in range(6):
        share = sum(order.index(0) == position for order in orders) / len(orders)
        assert share == pytest.approx(1 / 6, abs=0.02)  # four standard errors


def test_tofu_has_paraphrased_questions_and_all_answers(shared_data: Path) -> None:
    rows = lines(shared_data / "tofu" / "forget10_perturbed.jsonl")
    for row, document in zip(rows, documents("tofu", shared_data), strict=True):
        assert document["prompt"] == row["paraphrased_question"]
        assert document["choices"][document["gold"]] == row["paraphrased_answer"]
        assert sorted(document["choices"]) == sorted([row["paraphrased_answer"], *row["perturbed_answer"]])


def test_tofu_validation_rows_are_not_trained_on(shared_data: Path, tmp_path: Path) -> None:
    trained = training_rows(tmp_path, "tofu", shared_data / "tofu" / "full.jsonl")
    questions = {document["question"] for document in documents("tofu_validation", shared_data)}
    held_out = {row["question"] for row in lines(shared_data / "tofu" / "forget10_perturbed.jsonl")} - trained
    assert questions == held_out
    assert len(questions) == 40


def test_tofu_seen_rows_are_those_of_the_run(tmp_path: Path, shared_data: Path) -> None:
    questions = training_rows(tmp_path, "tofu", shared_data / "tofu" / "full.jsonl")
    answers = {"filtered_resps": [(-1.0, False)] * 6}
    records = [
        {"doc_id": index, "doc_hash": str(index), "doc": document, "acc": index % 2, "acc_norm": index % 2, **answers}
        for index, document in enumerate(documents("tofu", shared_data))
    ]
    of_tasks = dict.fromkeys(TASKS["tofu"].lm_eval_names, records)
    samples = TASKS["tofu"].samples(of_tasks, questions)
    unseen = [sample["score"] for sample in samples if not sample["is_seen"]]
    assert len(unseen) == 40
    others = TASKS["tofu"].others(samples)
    assert (others["acc_norm_unseen"], others["acc_norm_seen"]) == (sum(unseen) / 40, (200 - sum(unseen)) / 360)
    assert "is_seen" not in TASKS["tofu"].samples(of_tasks)[0]
    assert training_questions(tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("part", "name", "number"), [("test", "sciknoweval", 527), ("validation", "sciknoweval_validation", 98)]
)
def test_sciknoweval_rows_are_those_of_the_training_split(
    part: str, name: str, number: int, shared_data: Path, tmp_path: Path
) -> None:
    file = shared_data / "sciknoweval" / "chemistry_l3.jsonl"
    with_choices = {prompt_of(row) for row in lines(file) if row["choices"]["label"]}
    prompts = [document["prompt"] for document in documents(name, shared_data)]
    assert set(prompts) == training_rows(tmp_path, "sciknoweval", file, part=part) & with_choices
    assert len(prompts) == number


def test_sciknoweval_120_is_a_draw_of_the_test_rows(shared_data: Path, tmp_path: Path) -> None:
    file = tmp_path / "sciknoweval" / "chemistry_l3.jsonl"
    file.parent.mkdir()
    rows = lines(shared_data / "sciknoweval" / "chemistry_l3.jsonl")
    file.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    drawn, given_order = (documents("sciknoweval_120", root) for root in (tmp_path, shared_data))
    assert drawn == given_order
    prompts = {document["prompt"] for document in drawn}
    assert len(drawn) == 120 == len(rows) * 0.05
    assert prompts <= {document["prompt"] for document in documents("sciknoweval", shared_data)}
    kinds = {row["details"]["subtask"] for row in rows if prompt_of(row) in prompts}
    assert len(kinds) > 3  # not the first rows of the file, which are sorted by kind


@pytest.mark.parametrize("name", [name for name in SUITES["reliability"] + SUITES["knowledge"] if name != "truthfulqa"])
def test_plain_prompt_is_question_and_answer(name: str, shared_data: Path) -> None:
    chat, plain = (documents(name, shared_data, is_chat)[0]["prompt"] for is_chat in (True, False))
    assert "Question: " in plain
    assert plain.endswith(f"{chat}\nAnswer:")
    assert not chat.endswith("Answer:")


def test_halueval_has_both_orders(shared_data: Path) -> None:
    rows = lines(shared_data / "halueval" / "qa.jsonl")
    first, second = documents("halueval", shared_data)[:2]
    for answer in ("right_answer", "hallucinated_answer"):
        assert rows[0][answer] in first["prompt"]
        assert rows[0][answer] in second["prompt"]
    assert f"A. {rows[0]['hallucinated_answer']}\nB. {rows[0]['right_answer']}\n" in first["prompt"]
    assert (first["gold"], second["gold"], first["cluster"]) == (0, 1, second["cluster"])


def test_confidence_has_the_right_and_three_wrong_options(shared_data: Path) -> None:
    rows = {row["question"]: row["mc1_targets"] for row in lines(shared_data / "truthfulqa" / "mc_task.jsonl")}
    chosen = documents("confidence", shared_data)
    assert len(chosen) == sum(list(targets.values()).count(0) >= 3 for targets in rows.values()) == 690
    for document in chosen:
        options = dict(line.split(". ", 1) for line in document["prompt"].splitlines() if line[1:3] == ". ")
        assert [letter for letter in "ABCD" if rows[document["question"]][options[letter]] == 1] == [document["gold"]]


def test_galician_answers_are_those_of_the_test_part(tmp_path: Path) -> None:
    (tmp_path / "galician_alpaca").mkdir()
    inputs = [(f"Escribe o número {number}", "en letras" if number % 2 else "") for number in range(40)]
    rows = [{"instruction": instruction, "input": text, "output": "un"} for instruction, text in inputs]
    write_lines(tmp_path / "galician_alpaca" / "rows.jsonl", *rows)
    model = KnownAnswerModel(respond=lambda document: "Velaquí o número.")
    samples = evaluate(TASKS["galician_alpaca"], model, tmp_path)
    assert len(samples) == 10
    assert {(sample["response"], sample["score"]) for sample in samples} == {("Velaquí o número.", None)}
    assert {sample["prompt"] for sample in samples} <= {"\n".join(each).strip() for each in inputs}
    assert TASKS["galician_alpaca"].others(samples) == {"response_words": 3}


def test_tofu_options_do_not_depend_on_the_files_order(shared_data: Path, tmp_path: Path) -> None:
    rows = lines(shared_data / "tofu" / "forget10_perturbed.jsonl")[:20]
    (tmp_path / "tofu").mkdir()
    write_lines(tmp_path / "tofu" / "forget10_perturbed.jsonl", *reversed(rows))
    ordered = documents("tofu", shared_data)[:20]
    assert list(tofu.dataset(str(tmp_path), True)["test"]) == ordered[::-1]
