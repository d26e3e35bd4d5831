"""Answers on disk while a task runs."""

from finch.evaluation.answer_cache import AnswerCache


def filled(path, key="model a"):
    cache = AnswerCache(path, key)
    cache.put("one", [[-1.1000000238418579, True]])
    cache.put("two", [[-3.25, False]])
    cache.close(is_finished=False)
    return path


def test_answers_are_read_again_bit_for_bit(tmp_path):
    cache = AnswerCache(filled(tmp_path / "answers.jsonl"), "model a")
    assert cache.num_read == 2
    assert cache.get("one") == [[-1.1000000238418579, True]]
    assert cache.get("three") is None


def test_another_models_answers_are_dropped(tmp_path):
    cache = AnswerCache(filled(tmp_path / "answers.jsonl"), "model b")
    assert cache.num_read == 0
    assert cache.get("one") is None
    cache.close(is_finished=False)
    assert AnswerCache(tmp_path / "answers.jsonl", "model a").num_read == 0


def test_a_last_line_that_was_cut_off_is_run_again(tmp_path):
    path = filled(tmp_path / "answers.jsonl")
    path.write_text(path.read_text()[:-10])
    cache = AnswerCache(path, "model a")
    assert cache.num_read == 1
    cache.put("two", [[-3.25, False]])
    cache.close(is_finished=False)
    assert AnswerCache(path, "model a").get("two") == [[-3.25, False]]


def test_the_file_ends_with_the_task(tmp_path):
    cache = AnswerCache(filled(tmp_path / "answers.jsonl"), "model a")
    cache.close(is_finished=True)
    assert not (tmp_path / "answers.jsonl").exists()
