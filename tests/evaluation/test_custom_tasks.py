"""lm-eval's other tasks: which metric is the headline, and what cannot be compared."""

import importlib.util
import re
from types import SimpleNamespace

import pytest

from finch.base.errors import UserError
from finch.evaluation.custom_tasks import custom_task
from finch.evaluation.results import NEW, OLD


class Manager:
    """lm-eval's, with one task."""

    def __init__(self, *metrics, kind="multiple_choice", parts=("arc_easy",), filters=None):
        listed = [{"metric": metric, "higher_is_better": True} for metric in metrics]
        config = SimpleNamespace(metric_list=listed, num_fewshot=5, filter_list=filters)
        self.documents = [{"question": f"{name}?"} for name in "abcdefghij"]
        self.settings = {"doc_to_choice": ["yes", "no"]}
        part = SimpleNamespace(
            config=config,
            OUTPUT_TYPE=kind,
            eval_docs=self.documents,
            dump_config=lambda: self.settings,
            fewshot_docs=lambda: None,
        )
        self._parts = dict.fromkeys(parts, part)
        self.task_index = {"arc_easy": None}

    def load(self, _):
        return {"tasks": self._parts}


def record(number, **metrics):
    document = {"doc_id": number, "doc_hash": f"hash {number}", "filter": "none", "filtered_resps": [(-1.5, True)]}
    return document | metrics


def test_headline_is_the_normalized_accuracy():
    task = custom_task("arc_easy", Manager("acc", "acc_norm"), is_new=True, has_chat_template=True)
    assert (task.metric, task.role, task.suite) == ("acc_norm", NEW, "custom")
    assert re.fullmatch(
        r"arc_easy of lm-eval \([0-9a-f]{12}\), acc_norm; 5-shot; no chat template", task.definition(True)
    )
    others = [Manager("acc", "acc_norm") for _ in range(3)]
    others[1].documents[9] = {"question": "J?"}
    others[2].settings["doc_to_choice"] = ["yes", "never"]
    measures = [custom_task("arc_easy", each, is_new=True, has_chat_template=True).measure for each in others]
    assert [measure == task.measure for measure in measures] == [True, False, False]
    samples = task.samples({"arc_easy": [record(1, acc=1, acc_norm=0.0), record(0, acc=0, acc_norm=1.0)]})
    found = [(sample["doc_id"], sample["score"], sample["responses"]) for sample in samples]
    assert found == [(0, 1.0, [-1.5]), (1, 0.0, [-1.5])]


def test_generated_answers_use_the_chat_template():
    task = custom_task("arc_easy", Manager("f1", kind="generate_until"), is_new=False, has_chat_template=True)
    assert (task.metric, task.role, task.uses_chat_template) == ("f1", OLD, True)
    assert task.definition(True).endswith("; 5-shot; chat template")
    plain = custom_task("arc_easy", Manager("f1", kind="generate_until"), is_new=False, has_chat_template=False)
    assert plain.definition(False).endswith("; 5-shot; no chat template")


def test_filters_are_named_and_all_scored(caplog):
    """As gsm8k's; lm-eval logs a record of a document for each filter."""
    filters = [{"name": "strict"}, {"name": "flexible"}]
    manager = Manager("exact_match", kind="generate_until", filters=filters)
    task = custom_task("arc_easy", manager, is_new=False, has_chat_template=False)
    assert task.metric == "exact_match,strict"
    assert "), exact_match,strict; " in task.definition(False)
    assert "; flexible: in custom.json, under others" in caplog.text
    found = [
        {**record(number, exact_match=score), "filter": name}
        for name, scores in (("strict", (0.0, 0.0)), ("flexible", (1.0, 0.0)))
        for number, score in enumerate(scores)
    ]
    samples = task.samples({"arc_easy": found})
    assert [sample["score"] for sample in samples] == [0.0, 0.0]
    assert task.others(samples) == {"exact_match,flexible": 0.5}
    part = SimpleNamespace(**vars(manager._parts["arc_easy"]))
    part.config = SimpleNamespace(**{**vars(part.config), "filter_list": [{"name": "answer"}, {"name": "loose"}]})
    manager._parts = {**manager._parts, "arc_hard": part}
    group = custom_task("arc_easy", manager, is_new=False, has_chat_template=False)
    assert group.metric == "exact_match,strict|answer"
    assert list(group.others([])) == ["exact_match,flexible", "exact_match,loose"]


def test_documents_of_a_group_have_separate_ids():
    task = custom_task("arc_easy", Manager("acc", parts=("one", "two")), is_new=False, has_chat_template=True)
    samples = task.samples({"one": [record(0, acc=1)], "two": [record(0, acc=0)]})
    assert [sample["doc_id"] for sample in samples] == ["one/0", "two/0"]


def test_unknown_task_is_corrected():
    message = "--tasks arc_esay is neither a task of finch nor one of lm-eval, did you mean arc_easy?"
    with pytest.raises(UserError, match=message.replace("?", r"\?")):
        custom_task("arc_esay", Manager("acc"), is_new=False, has_chat_template=True)


@pytest.mark.parametrize("metrics", [(), ("word_perplexity",)])
def test_task_without_a_score_per_document_is_refused(metrics):
    with pytest.raises(UserError, match="has no score per document"):
        custom_task("arc_easy", Manager(*metrics), is_new=False, has_chat_template=True)


def test_score_that_is_no_number_is_refused():
    task = custom_task("arc_easy", Manager("acc"), is_new=False, has_chat_template=True)
    with pytest.raises(UserError, match="document 0: acc is no number"):
        task.samples({"arc_easy": [record(0, acc=(1, 2))]})


def test_score_that_is_no_share_is_refused():
    task = custom_task("arc_easy", Manager("words"), is_new=False, has_chat_template=True)
    message = "document 0: words is 21, and scores are shown in percent; have process_results divide it"
    with pytest.raises(UserError, match=message):
        task.samples({"arc_easy": [record(0, words=21.0)]})


def test_a_task_is_another_one_when_a_helper_of_its_functions_changes(tmp_path):
    def measure(module):
        (tmp_path / "utils.py").write_text(module)
        spec = importlib.util.spec_from_file_location("utils", tmp_path / "utils.py")
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        manager = Manager("acc")
        manager.load("")["tasks"]["arc_easy"].config.process_results = loaded.results
        return custom_task("arc_easy", manager, is_new=False, has_chat_template=True).measure

    results = "def results(doc, found):\n    return {'acc': score(found)}\n"
    one, same, other = (measure(f"def score(found):\n    return {value}\n\n\n{results}") for value in (1, 1, 0))
    assert one == same != other
