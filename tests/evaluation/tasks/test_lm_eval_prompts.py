"""Local rows give the requests that lm-eval's registered tasks make of the hub's rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from helpers.known_answer_model import KnownAnswerModel
from helpers.punkt import add_punkt_tab
from helpers.rows import write_lines

from finch.evaluation.harness import task_manager
from finch.evaluation.tasks.lm_eval_tasks import SUBJECTS
from finch.evaluation.tasks.registry import TASKS

Rows = list[dict[str, Any]]


def hub_row(label: int, activity: str, ctx_a: str, ctx_b: str, *endings: str) -> dict[str, Any]:
    row = {"activity_label": activity, "ctx_a": ctx_a, "ctx_b": ctx_b, "ctx": f"{ctx_a} {ctx_b}".strip()}
    return {**row, "endings": list(endings), "label": str(label)}


KITCHEN = ("A woman stands in a kitchen. She mixes the dough.", "the woman")
KITCHEN_ENDINGS = ("eats the bowl.", "puts it on a tray.", "sings.", "leaves.")
KNIFE = ("How to sharpen a knife [title] Find a stone. [step] A whetstone works best.", "")
KNIFE_ENDINGS = ("Wet it [title] Hold it.", "Break it. [substeps] Hide.", "Eat it.", "Paint it.")
HELLASWAG_HUB = [
    hub_row(1, "Baking cookies", *KITCHEN, *KITCHEN_ENDINGS),
    hub_row(0, "Home and Garden", *KNIFE, *KNIFE_ENDINGS),
]


def local_row(row: dict[str, Any]) -> dict[str, Any]:
    """HellaSwag's rows as its authors publish them: without marks, and without the parts of the context."""
    fields = {"activity_label": row["activity_label"], "ctx": row["ctx"], "endings": row["endings"]}
    text = json.dumps(fields).replace(" [title]", ".").replace(" [step]", "").replace(" [substeps]", "")
    return {**json.loads(text), "label": int(row["label"])}


def read(file: Path, count: int = 3) -> Rows:
    return [json.loads(line) for line in file.read_text().splitlines()[:count]]


def truthfulqa_of_hub(rows: Rows) -> Rows:
    fields = ("mc1_targets", "mc2_targets")
    return [
        {**row, **{field: {"choices": list(row[field]), "labels": list(row[field].values())} for field in fields}}
        for row in rows
    ]


def serve(monkeypatch: pytest.MonkeyPatch, rows: dict[str, dict[str, Rows]]) -> list[tuple[Any, ...]]:
    """Replaces the hub; returns the names that are loaded."""
    loaded = []

    def load_dataset(path: str, name: str | None = None, split: str | None = None, **_: Any) -> Any:
        loaded.append((path, name))
        tables = {part: datasets.Dataset.from_list(of_part) for part, of_part in rows[path].items()}
        return tables if split is None else tables[split]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return loaded


def requests(name: str, data_root: Path | None, *, has_chat_template: bool = True) -> list[tuple[Any, ...]]:
    """Contexts and continuations, or prompts and settings, of a task's first documents."""
    task = task_manager(data_root, has_chat_template).load([name])["tasks"][name]
    task.set_config("num_fewshot", 0)
    template = KnownAnswerModel().apply_chat_template
    task.build_all_requests(limit=3, apply_chat_template=name == "ifeval" and has_chat_template, chat_template=template)
    return [instance.args for instance in task.instances]


def test_hellaswag_requests_are_lm_evals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hellaswag").mkdir()
    write_lines(tmp_path / "hellaswag" / "validation.jsonl", *map(local_row, HELLASWAG_HUB))
    local = requests("hellaswag", tmp_path)
    context = "Baking cookies: A woman stands in a kitchen. She mixes the dough. The woman"
    assert local[1] == (context, " puts it on a tray.")
    write_lines(tmp_path / "hellaswag" / "validation.jsonl", *HELLASWAG_HUB)
    assert requests("hellaswag", tmp_path) == local  # a file in the hub's form
    serve(monkeypatch, {"Rowan/hellaswag": {"train": HELLASWAG_HUB, "validation": HELLASWAG_HUB}})
    assert requests("hellaswag", None) == local


def test_mmlu_requests_are_lm_evals(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = requests("mmlu_virology", shared_data)
    tables = {
        split: [row for row in read(shared_data / "mmlu" / f"{split}.jsonl", 600) if row["subject"] == "virology"]
        for split in ("dev", "test")
    }
    loaded = serve(monkeypatch, {"cais/mmlu": tables})
    assert requests("mmlu_virology", None) == local
    assert loaded == [("cais/mmlu", "virology")]


def test_ifeval_requests_are_lm_evals(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_punkt_tab(tmp_path, monkeypatch)
    rows = read(shared_data / "ifeval" / "prompts.jsonl")
    local = requests("ifeval", shared_data)
    assert local[0][0] == f"<user>{rows[0]['prompt']}</user><assistant>"
    assert local[0][1] == {"until": [], "do_sample": False, "temperature": 0.0, "max_gen_toks": 1280}
    plain = requests("ifeval", shared_data, has_chat_template=False)
    assert plain[0][0] == f"Question: {rows[0]['prompt']}\nAnswer:"
    assert plain[0][1] == {**local[0][1], "until": ["\nQuestion:"]}
    serve(monkeypatch, {"google/IFEval": {"train": rows}})
    assert requests("ifeval", None) == local


@pytest.mark.parametrize(
    ("name", "lm_eval_name", "config"),
    [
        ("winogrande", "winogrande", "winogrande_xl"),
        ("truthfulqa", "truthfulqa_mc1", "multiple_choice"),
        ("truthfulqa", "truthfulqa_mc2", "multiple_choice"),
        ("tofu", "finch_tofu", "forget10_perturbed"),
        ("sciknoweval", "finch_sciknoweval", "v2"),
        ("halueval", "finch_halueval", "qa"),
        ("confidence", "finch_confidence", "multiple_choice"),
    ],
)
def test_tasks_read_the_hub_as_local_rows(
    name: str, lm_eval_name: str, config: str, shared_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TASKS[name].sources[0]
    local = requests(lm_eval_name, shared_data)
    rows = read(shared_data / source.file, 3000)
    rows = truthfulqa_of_hub(rows) if name in ("truthfulqa", "confidence") else rows
    loaded = serve(monkeypatch, {source.hub: {"train": rows, source.split: rows}})
    assert requests(lm_eval_name, None) == local
    assert loaded == [(source.hub, config)]


def test_hub_names_are_lm_evals() -> None:
    import lm_eval.tasks
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: None)
    tasks = Path(lm_eval.tasks.__file__).parent
    files = ("hellaswag/hellaswag", "winogrande/default", "ifeval/ifeval", "truthfulqa/truthfulqa_mc1")
    for name, file in ((file.partition("/")[0], tasks / f"{file}.yaml") for file in files):
        config = yaml.load(file.read_text(), Loader)
        source = TASKS[name].sources[0]
        split = config.get("test_split") or config["validation_split"]
        assert (source.hub, source.config, source.split) == (config["dataset_path"], config["dataset_name"], split)
    group = {path.stem for path in (tasks / "mmlu" / "default").glob("mmlu_*.yaml")}
    assert group == {f"mmlu_{subject}" for subject in SUBJECTS}
    mmlu = yaml.load((tasks / "mmlu" / "default" / "_mmlu.yaml").read_text(), Loader)
    assert mmlu["aggregate_metric_list"] == [{"metric": "acc", "weight_by_size": True}]
