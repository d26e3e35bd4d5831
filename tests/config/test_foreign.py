"""A config that comes with a run names models, rows and losses, and runs nothing else."""

import pytest
from omegaconf import OmegaConf

from finch.config.foreign import refuse_foreign
from finch.config.instantiate import load_config
from finch.errors import UserError
from finch.evaluation.model_folders import training_questions

ROWS = "finch.data.rows.rows_dataset"


@pytest.mark.parametrize(
    "path",
    [
        *(ROWS, "torchtune.datasets.instruct_dataset", "torchtune.models.llama3.llama3_8b", "finch.models.auto"),
        *("finch.objectives.TALR", "torchtune.modules.loss.CEWithChunkedOutputLoss", "torch.nn.CrossEntropyLoss"),
        *("torchtune.data.padded_collate_sft", "torchtune.training.FullModelHFCheckpointer"),
    ],
)
def test_components_of_runs_are_accepted(path, tmp_path):
    refuse_foreign(OmegaConf.create({"part": {"_component_": path}, "name": path}), tmp_path, ["part", "name"])


@pytest.mark.parametrize(
    "part",
    [
        *("os.system", "timeit.timeit", "finch.files.os.system", "finch.models.auto_builders.torch.load"),
        *("torchtune.models.convert_weights.torch.load", "finch.data.chat_client.ChatClient", "torch.load", "torch.nn"),
        *("torchtune.data._utils.random.seed", "finch.data.rows.rows_dataset.__globals__", "x"),
    ],
)
def test_others_are_refused(part, tmp_path):
    blocks = {"one": {"_component_": part}, "short": part, "list": [{"deep": {"_component_": part}}]}
    for key in blocks:
        with pytest.raises(UserError, match=r"is not of finch or torchtune|does not exist"):
            refuse_foreign(OmegaConf.create(blocks), tmp_path, [key])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- 1", "it has no keys"),
        ("", "has no dataset"),
        ("dataset: x", "dataset names x"),
        ("dataset:", "has no dataset"),
        ("dataset: [3]", "has no dataset"),
        ("dataset: ${nope}", "dataset cannot be resolved"),
        (f"dataset: {{_component_: {ROWS}, data_files: '${{oc.env:HOME}}/x'}}", "asks for ${oc.env:HOME}"),
        ('dataset: {_component_: timeit.timeit, stmt: \'open("CANARY", "w")\'}', "dataset names timeit.timeit"),
        (f"dataset: {{_component_: {ROWS}, data_files: /nowhere.jsonl}}", "/nowhere.jsonl does not exist"),
    ],
)
def test_a_strange_config_costs_a_runs_questions_only(text, message, tmp_path, caplog):
    (tmp_path / "config.yaml").write_text(text.replace("CANARY", str(tmp_path / "canary")))
    assert training_questions(tmp_path) is None
    assert message in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_read_foreign_keeps_interpolations_within_the_file(tmp_path):
    (tmp_path / "config.yaml").write_text(f"rows: a.jsonl\ndataset: {{_component_: {ROWS}, data_files: '${{rows}}'}}")
    cfg = load_config(tmp_path / "config.yaml")
    refuse_foreign(cfg, tmp_path, ["dataset"])
    assert cfg.dataset.data_files == "a.jsonl"
