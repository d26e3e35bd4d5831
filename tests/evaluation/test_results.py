"""Results of evaluations as files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from finch.base.errors import UserError
from finch.evaluation.results import (
    SuiteResult,
    TaskResult,
    base_path,
    read_result,
    read_results,
    read_samples,
    write_result,
)

TASK = TaskResult("old", "acc_norm", "0-shot, no chat template", 0.5, 2, "forgetting.hellaswag.jsonl", chance=0.25)
RESULT = SuiteResult(
    "forgetting", "/models/tuned", "ab12", False, "../base/forgetting.json", {}, {}, {"hellaswag": TASK}
)
SAMPLES = [{"doc_id": 0, "doc_hash": "a", "score": 1.0}, {"doc_id": 1, "doc_hash": "b", "score": 0.0}]


def test_write_result_reads_back(tmp_path: Path) -> None:
    path = write_result(tmp_path / "evaluation", RESULT, {"hellaswag": SAMPLES})
    assert read_result(path) == RESULT
    assert read_results(path.parent) == {"forgetting": RESULT}
    assert read_samples(path.parent, TASK) == SAMPLES
    assert base_path(path, RESULT) == tmp_path / "base" / "forgetting.json"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "no result of finch evaluate"),
        (json.dumps({"suite": "forgetting"}), "no result of finch evaluate"),
        (json.dumps({"format": 99}), r"^\S* was written by a later finch; upgrade finch"),
        ("[" * 3000, "no result of finch evaluate"),
        (json.dumps({"format": 1, **asdict(RESULT), "settings": []}), r"\(settings: Input should be an object\)"),
        (json.dumps({"format": 1, **asdict(RESULT), "versions": None}), r"\(versions: Input should be an object\)"),
        (
            json.dumps({"format": 1, **asdict(RESULT), "tasks": {"a": {"score": 1e308}}}),
            "the number 1e[+]308 is not between",
        ),
        (None, "does not exist"),
    ],
)
def test_read_result_refuses(tmp_path: Path, content: str | None, reason: str) -> None:
    path = tmp_path / "forgetting.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=reason):
        read_result(path)


def test_samples_of_another_folder_or_type_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"doc_id": 0, "doc_hash": "a", "score": 1.0}\n')
    with pytest.raises(UserError, match=r"evaluation/secret\.jsonl cannot be read"):
        read_samples(tmp_path / "evaluation", replace(TASK, samples="../secret.jsonl"))
    (tmp_path / "text.jsonl").write_text('{"doc_id": 0, "doc_hash": "a", "score": "1.0"}\n')
    with pytest.raises(UserError, match=r"0\.score: Input should be a valid number"):
        read_samples(tmp_path, replace(TASK, samples="text.jsonl"))
    with pytest.raises(UserError, match=r"forgetting\.hellaswag\.jsonl cannot be read"):
        read_samples(tmp_path, TASK)  # there is none
