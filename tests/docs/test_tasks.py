"""docs/tasks.md: its tables are those of the code."""

from __future__ import annotations

from helpers.runs import ROOT

from finch.evaluation.tasks.registry import TASKS

ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "tasks.md").read_text().splitlines()
    if line.startswith("| ")
]


def test_table_has_each_task_with_its_suite_and_metric() -> None:
    table = {row[0]: row for row in ROWS if row[0] in TASKS}
    assert table.keys() == TASKS.keys()
    for name, task in TASKS.items():
        assert (table[name][1], table[name][2].split(",")[0]) == (task.suite, task.metric)
        assert (table[name][6] == "chat") == task.uses_chat_template
        percent = {1 / 4: "25%", 1 / 2: "50%", 1 / 6: "16.7%", 3 / 16: "0.1875", None: ""}
        assert table[name][5] == percent[task.chance]


def test_table_has_each_file_with_its_hub_name() -> None:
    for task in TASKS.values():
        for source in task.sources:
            (row,) = [row for row in ROWS if source.file in row[0]]
            assert source.hub in row[2]
            assert source.split in row[2]
            assert all(f"`{field}`" in row[1] for field in source.fields if field != "details"), row
