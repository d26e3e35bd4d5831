"""A config that comes with a run is data: it names models, tokenizers, local rows and losses, and runs nothing else."""

import os
import socket

import pytest
import yaml
from helpers.runs import MINIMAL

from finch.base.errors import UserError
from finch.config.instantiate import config_names, locate
from finch.evaluation.foreign import _lists, offline, read_config_of, read_data
from finch.evaluation.model_folders import training_questions

ROWS = {"_component_": "finch.data.rows.rows_dataset", "data_files": "a.jsonl"}
JSON = {"_component_": "torchtune.datasets.instruct_dataset", "source": "json", "data_files": ["a.jsonl"]}
TOKENIZER = MINIMAL["tokenizer"]
CONFIG = {**MINIMAL, "dataset": JSON, "optimizer": {"_component_": "my.Optimizer"}}
UNUSED = ("optimizer",)


def read(folder, config):
    (folder / "config.yaml").write_text(config if isinstance(config, str) else yaml.safe_dump(config))
    return read_config_of(folder, UNUSED)


@pytest.mark.parametrize("key", list(_lists()[0]))
def test_listed_components_exist(key):
    """LinearCrossEntropyLoss is of torchtune's main branch."""
    names = _lists()[0][key]
    assert all(callable(locate(name, key)) for name in names if not name.endswith("LinearCrossEntropyLoss"))
    assert all(name.startswith(("finch.", "torchtune.", "torch.nn.CrossEntropyLoss")) for name in names)


def test_what_finchs_own_configs_name_is_listed():
    components, arguments = _lists()
    for name, file in config_names().items():
        for key, block in yaml.safe_load(file.read_text()).items():
            if key in components and isinstance(block, dict):
                assert block["_component_"] in components[key], (name, key)
                assert set(block) <= arguments.get(key, set(block)), (name, key)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dataset": ROWS, "dataset_validation": {"one": {**ROWS, "part": "validation"}, "two": [JSON]}},
        {"dataset": [{**ROWS, "weight": 0.5, "new_system_prompt": "see https://a.b"}, {**JSON, "weight": 0.5}]},
        {
            "dataset": {
                "_component_": "finch.data.tofu.tofu_dataset",
                "source": "locuslab/TOFU",
                "data_files": "a.jsonl",
            }
        },
        {"probes": {"own": {"kind": "self"}, "rows": {"data_files": "a.jsonl", "source": "json"}}},
        {
            "loss": {"_component_": "finch.objectives.TALR", "tau": "auto"},
            "collate_fn": "torchtune.data.padded_collate_sft",
        },
        {
            "model": {"_component_": "finch.models.auto", "path": "DIR"},
            "tokenizer": {**TOKENIZER, "prompt_template": None},
        },
    ],
)
def test_what_finch_saves_is_read(changes, tmp_path):
    config = {**CONFIG, **changes}
    assert read(tmp_path, config) == {key: value for key, value in config.items() if key != "optimizer"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({key: {"_component_": path}}, f"{key}._component_={path} is not among the components")
            for key in ("model", "loss", "dataset", "profiler")
            for path in ("os.system", "finch.base.files.os.system", "torchtune.data.load_image", "torch.load", "x")
        ),
        ({"loss": "os.system"}, "loss=os.system is not among"),
        ({"collate_fn": "builtins.print"}, "collate_fn=builtins.print is not among"),
        ({"dataset_validation": {"one": [{"_component_": "os.system"}]}}, r"dataset_validation.one\[0\]._component_=os.system is not"),
        ({"probes": {"p": {"kind": "self", "column_map": {"_component_": "os.system"}}}}, "probes.p.column_map._component_=os.system"),
        ({"model": {**CONFIG["model"], "more": [{"_component_": "os.system"}]}}, r"model.more\[0\]._component_=os.system is not"),
        ({"model": {"_component_": ["os", "system"]}}, "is not among"),
        ({"rows": {"_component_": "os.system"}, "dataset": "${rows}"}, "os.system"),
        ({"rows": "a.jsonl"}, "rows=a.jsonl is no key that finch saves"),
        ({"tokenizer": {**TOKENIZER, "prompt_template": "os.getcwd"}}, "tokenizer.prompt_template=os.getcwd is not among"),
        ({"dataset": {**JSON, "filter_fn": "os.system"}}, "has filter_fn, which is not among the arguments"),
        ({"dataset": {**JSON, "storage_options": {}}}, "has storage_options, which"),
        *(
            ({"dataset": {**ROWS, "data_files": url}}, f"dataset.data_files={url} is no path of this machine")
            for url in ("http://a.b/c.jsonl", "zip://c.jsonl::file:///a.zip", "hf://datasets/a/b.jsonl", "simplecache::c", "data:c")
        ),
        ({"dataset": {**ROWS, "data_files": ["a.jsonl", "s3://a/b"]}}, "s3://a/b is no path"),
        ({"checkpointer": {**CONFIG["checkpointer"], "checkpoint_dir": "ftp://a"}}, "ftp://a is no path"),
        ({"dataset": {"_component_": ROWS["_component_"], "source": "org/name"}}, "has rows that are in no local file"),
        ({"dataset": {**ROWS, "source": "org/name"}}, "has rows that are in no local file"),
        ({"dataset": {**JSON, "source": "org/name"}}, "has rows that are in no local file"),
        ({"dataset": {"_component_": "torchtune.datasets.alpaca_dataset"}}, "has rows that are in no local file"),
        ({"dataset": {"_component_": "finch.data.tofu.tofu_dataset"}}, "has rows that are in no local file"),
        ({"dataset": {"_component_": "finch.data.sciknoweval.sciknoweval_solutions_dataset", "data_files": "a"}}, "in no local"),
        ({"probes": {"p": {"source": "org/name"}}}, "probes.p={.*} has rows that are in no local file"),
        ({"tokenizer": {**TOKENIZER, "path": "/dev/zero"}}, "tokenizer.path=/dev/zero is neither a file nor a folder"),
    ],
)  # fmt: skip
def test_what_else_it_names_is_refused(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read(tmp_path, {**CONFIG, **changes})


@pytest.mark.parametrize(
    "value",
    [
        *("${oc.env:HOME}", "${oc.env:${output_dir}}", "a${oc.decode:'1'}b", "${oc.select:model}", r"\${oc.env:HOME}", r"\${output_dir}"),
        *("${nope}", "${", "${output_dir", "${output_dir}${", "${oc.env:HOME", "$${oc.env:HOME}", "${${output_dir}}", "${finch.x:}"),
        *({"${oc.env:HOME}": 1}, ["a", ["${oc.env:HOME}"]], "${model.half}{oc.env:HOME}", "${model.name}"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("key", ["output_dir", "optimizer"])
def test_no_resolver_runs_wherever_it_is_named(value, key, tmp_path):
    model = {**CONFIG["model"], "half": "$", "name": "${output_dir:x}"}
    config = {**CONFIG, "model": model, "seed": value} if key == "output_dir" else {**CONFIG, key: {"lr": value}}
    with pytest.raises(UserError, match=r"asks for more than another key; write the value|cannot be read as YAML"):
        read(tmp_path, {"output_dir": "out", **config})


def test_references_to_other_keys_stay(tmp_path):
    own = {**JSON, "data_files": "${output_dir}/rows.jsonl"}
    config = {
        **CONFIG,
        "dataset": own,
        "dataset_validation": {**JSON, "data_files": "${dataset.data_files}"},
        "seed": "${epochs}",
    }
    found = read(tmp_path, {**config, "epochs": 3})
    assert found["dataset_validation"]["data_files"] == "out/rows.jsonl"
    assert found["seed"] == 3


@pytest.mark.parametrize(
    "text",
    ["model: !!binary aGk=", "model: !!python/object/apply:pathlib.PosixPath [a]", "model: !!set {a}"],
)
def test_values_are_plain(text, tmp_path):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"no number and no text; write one|cannot be read as YAML"):
        read_data(tmp_path / "config.yaml")


def test_a_trusted_run_is_read_as_a_config_that_is_named(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("model: ${oc.env:MODEL}\nmine: 1\n")
    monkeypatch.setenv("MODEL", "m")
    assert read_config_of(tmp_path, ("mine",), trust=True) == {"model": "m"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "cannot be read as YAML"),
        ("- 1", "it has no keys"),
        ("{}", "has no dataset"),
        ("dataset: x", "dataset=x is not among"),
        ("dataset:", "has no dataset"),
        ("dataset: [3]", "has no dataset"),
        ("dataset: ${nope}", "asks for more than another key"),
        ('dataset: {_component_: timeit.timeit, stmt: \'open("CANARY", "w")\'}', "dataset._component_=timeit.timeit"),
        ("dataset: {_component_: finch.data.rows.rows_dataset, data_files: /nowhere.jsonl}", "/nowhere.jsonl does not exist"),
    ],
)  # fmt: skip
def test_a_strange_config_costs_a_runs_questions_only(text, message, tmp_path, caplog):
    (tmp_path / "config.yaml").write_text(text.replace("CANARY", str(tmp_path / "canary")))
    assert training_questions(tmp_path) is None
    assert message in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_offline_reaches_no_other_machine(tmp_path):
    own = socket.socket(socket.AF_UNIX)
    own.bind(str(tmp_path / "socket"))
    own.listen()
    with offline():
        for reach in (
            lambda: socket.create_connection(("localhost", 9)),
            lambda: socket.socket().connect(("127.0.0.1", 9)),
            lambda: socket.socket().connect_ex(("127.0.0.1", 9)),
            lambda: socket.socket(type=socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9)),
        ):
            with pytest.raises(OSError, match="files of a run may not name other machines"):
                reach()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(tmp_path / "socket"))
    own.close()
    assert socket.getaddrinfo("127.0.0.1", 9)
    assert os.path.exists(tmp_path / "socket")


@pytest.mark.parametrize("pattern", ["/**/*.jsonl", "/*/*/*.jsonl", "/h?me/*.jsonl", "/[a-z]*/*.jsonl"])
def test_a_pattern_does_not_search_a_whole_disk(pattern, tmp_path):
    read(tmp_path, {**CONFIG, "dataset": {**ROWS, "data_files": "/rows/**/*.jsonl"}})
    with pytest.raises(UserError, match="is no path of this machine"):
        read(tmp_path, {**CONFIG, "dataset": {**ROWS, "data_files": pattern}})
