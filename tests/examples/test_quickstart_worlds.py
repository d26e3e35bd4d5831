"""The quickstart's worlds: their facts, and the same as tasks of lm-eval."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sentencepiece
import transformers
from lm_eval.tasks import TaskManager, get_task_dict
from torchtune.data import InputOutputToMessages
from torchtune.models.llama2 import llama2_tokenizer

from examples.quickstart.base import VOCAB_SIZE
from examples.quickstart.evaluation_tasks import TASKS, copy_base, write_tasks
from examples.quickstart.world import NEW_RELATIONS, OLD_RELATIONS, new_world, old_world


def words(world):
    return {word.strip("?.").lower() for line in world.text() for word in line.split()}


def test_worlds_have_their_sizes_and_are_deterministic():
    old, new = old_world(), new_world()
    assert (len(old.first_phrasings), len(new.first_phrasings)) == (600, 200)
    assert (len(old.rows), len(new.rows)) == (2400, 800)
    assert old == old_world()


def test_new_world_shares_no_word_with_old():
    assert not words(old_world()) & words(new_world())


def test_a_fact_has_one_answer_in_all_phrasings():
    for world, relations in ((old_world(), OLD_RELATIONS), (new_world(), NEW_RELATIONS)):
        answers = {}
        for row in world.rows:
            answers.setdefault(row["fact"], set()).add(row["answer"])
        assert all(len(choices) == 1 for choices in answers.values())
        questions = [row["question"] for row in world.rows]
        assert len(set(questions)) == len(questions)
        assert {answer for choices in answers.values() for answer in choices} <= {
            answer for _, choices in relations.values() for answer in choices
        }


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's tokenizer, trained as there."""
    folder = tmp_path_factory.mktemp("base")
    text = folder / "text.txt"
    text.write_text("\n".join([*old_world().text(), *new_world().text()]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "tokenizer"), vocab_size=VOCAB_SIZE, model_type="bpe", minloglevel=2
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_copied_base_has_the_tokens_of_training(base: Path, tmp_path: Path) -> None:
    copied = transformers.AutoTokenizer.from_pretrained(copy_base(base, tmp_path / "base"))
    trained = llama2_tokenizer(str(base / "tokenizer.model"), prompt_template=None)
    trained.prompt_template = None
    messages = InputOutputToMessages(column_map={"input": "question", "output": "answer"})
    for world in (old_world(), new_world()):
        for row in world.first_phrasings:
            tokens = trained.tokenize_messages(messages(row)["messages"])[0]
            assert [*copied.encode(f"{row['question']} {row['answer']}"), trained.eos_id] == tokens


def test_tasks_ask_for_each_fact_once(tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks")
    tasks = get_task_dict(list(TASKS), TaskManager(include_path=str(folder), include_defaults=False))
    for name, (world, _) in TASKS.items():
        rows = list(tasks[name].test_docs())
        assert [row["fact"] for row in rows] == list(range(len(world().first_phrasings)))
        for row, fact in zip(rows, world().first_phrasings, strict=True):
            assert (
                tasks[name].doc_to_text(row) + tasks[name].doc_to_target(row) == f"{fact['question']} {fact['answer']}"
            )
            assert fact["answer"] in row["choices"]
