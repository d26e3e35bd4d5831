"""The keys: types, choices and defaults, and the JSON schemas made from them."""

import inspect
import json
import runpy

import jsonschema
import pytest
import referencing
import yaml
from helpers.runs import ROOT

from finch.config.instantiate import config_names, grid_names, locate
from finch.config.key_search import shown_keys
from finch.config.schema import (
    COMPONENTS,
    REQUIRED,
    AnySchedule,
    Dataset,
    FullFinetuneKeys,
    LoraBuilder,
    LoraFinetuneKeys,
    affecting,
    keys,
)
from finch.distributed.precision import PRECISIONS
from finch.study.sweep import grid

KEYS = shown_keys(LoraFinetuneKeys)
SCHEMAS = {path: json.loads(path.read_text()) for path in (ROOT / "finch" / "config").glob("*.schema.json")}
SCRIPT = runpy.run_path(str(ROOT / ".ci" / "pages" / "json_schema.py"))


def accepts(model, key, value):
    """Whether pydantic accepts the value of one key, the others aside."""
    block, _, name = key.rpartition(".")
    values = {name: value} if not block else {block: {name: value}}
    try:
        model.model_validate(values)
    except ValueError as error:
        return all(problem["loc"][0] != key.partition(".")[0] for problem in error.errors())
    return True


@pytest.mark.parametrize("model", [LoraFinetuneKeys, *COMPONENTS])
def test_models_accept_their_defaults(model):
    given = {name: key.default for name, key in keys(model).items() if "." not in name and key.default is not REQUIRED}
    assert [name for name, value in given.items() if not accepts(model, name, value)] == []


def test_every_key_says_what_it_affects():
    affected = [affecting(what) for what in ("result", "speed", "place")]
    assert sum(map(len, affected)) == len(LoraFinetuneKeys.model_fields)
    assert frozenset().union(*affected) == {key for key in keys(LoraFinetuneKeys) if "." not in key}


def test_keys_are_used():
    files = [path for folder in ("finch", "recipes") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text() for path in files if path.parent.name != "config")
    for key in LoraFinetuneKeys.model_fields:
        assert f".{key}" in code or f'"{key}"' in code, key


def test_dtype_choices_are_the_implemented_ones():
    assert KEYS["dtype"].expected == "fp32, bf16, bf16_mixed, bf16_stochastic or fp64"
    assert all(accepts(FullFinetuneKeys, "dtype", name) for name in PRECISIONS)


@pytest.mark.parametrize(
    ("key", "expected", "accepted", "rejected"),
    [
        ("batch_size", "int >= 1", [1, 8], [0, 1.0, True, "1"]),
        ("distributed_timeout", "number >= 1", [1, 2.5], [0, False, "x", float("nan")]),
        ("shuffle", "True or False", [True, False], [1, "True"]),
        ("seed", "int >= 0 or null", [0, 7], [-1]),
        ("clip_grad_norm", "number > 0 or null", [1, 0.5, "1.0", float("inf")], [0, -1, "x", True, float("nan")]),
        ("ac_mode", "full, selective or null", ["full", "selective"], ["op", 1]),
        ("ac_option", "int >= 1 or null", [1, "2"], [0, "0", "op", True]),
        ("device", "auto, cpu, cuda or cuda:N", ["auto", "cpu", "cuda", "cuda:1"], ["tpu", "cuda:x", "cpu:0", 0]),
        ("data_parallel_shard_dim", "-1 or int >= 1", [-1, 1, 8], [0, -2, "all"]),
        ("resume_from_checkpoint", "True, False, auto or PATH", [True, False, "auto", "run/step_5"], [1]),
        ("cudnn_deterministic_mode", "default, warn, error, 0, 1, 2 or null", ["warn", 0, 2], [True, 3, "on"]),
        ("log_level", "DEBUG, INFO, WARNING, ERROR or CRITICAL", ["INFO", "debug", "Warn"], ["LOUD", 10]),
        (
            "select_by",
            "validation_loss, validation/NAME/loss, probe/NAME/loss, probe/NAME/accuracy, probe/NAME/kl, probe/NAME/kl/GROUP or null",
            ["validation_loss", "validation/a/loss", "probe/b/kl", "probe/b/kl/code"],
            ["validation/a/kl", "probe/b/c/kl", "probe/b/kl\n"],
        ),
        ("export_dtype", "fp32, bf16, fp64 or null", ["fp32", "bf16", "fp64"], ["bf16_mixed", "fp16"]),
        ("model", "component", [{"_component_": "a.b"}], [{}, [], 7, "x"]),
        ("dataset", "component or list", [{"_component_": "a.b"}, []], [7, "x"]),
        ("dataset_validation", "component, named components, list or null", [{}, []], [7, "x"]),
        ("output_dir", "text", ["x"], [7]),
        ("checkpoint.every_n_minutes", "number >= 0 or null", [0, 0.5, None], [-1, "x"]),
    ],
)
def test_values(key, expected, accepted, rejected):
    assert KEYS[key].expected == expected
    assert [value for value in accepted if not accepts(FullFinetuneKeys, key, value)] == []
    assert [value for value in rejected if accepts(FullFinetuneKeys, key, value)] == []


@pytest.mark.parametrize("model", [model for model in COMPONENTS if model not in (LoraBuilder, Dataset)])
def test_arguments_are_those_of_the_component(model):
    given_by_finch = {"optimizer", "num_training_steps", "total_steps", "last_epoch", "tokenizer"}
    parameters = dict(inspect.signature(locate(model.component, model.key)).parameters)
    if issubclass(model, AnySchedule):  # which the recipe applies to torch's schedulers
        parameters.setdefault("decay", inspect.Parameter("decay", inspect.Parameter.KEYWORD_ONLY, default=0.0))
    assert set(keys(model)) == set(parameters) - given_by_finch
    for name, key in keys(model).items():
        default = parameters[name].default
        if (model.component, name) == (
            "finch.FinchLR",
            "init",
        ):  # loops of one's own start without a pass over the rows
            assert (key.default, default) == ("dataset", "first_batch")
        elif default is inspect.Parameter.empty:
            assert key.default is REQUIRED
        else:
            assert key.default == default, name


def test_arguments_of_datasets_and_lora_builders_exist():
    paths = [
        "rows.rows",
        "tofu.tofu",
        "sciknoweval.sciknoweval",
        "sciknoweval.sciknoweval_solutions",
        "galician_alpaca.galician_alpaca",
    ]
    datasets = [inspect.signature(locate(f"finch.data.{path}_dataset", "dataset")).parameters for path in paths]
    assert set(keys(Dataset)) == {name for parameters in datasets for name in parameters} - {"tokenizer"}
    defaults = {name: parameter.default for name, parameter in datasets[0].items() if name != "tokenizer"}
    assert {name: keys(Dataset)[name].default for name in defaults} == defaults
    for path in ("torchtune.models.llama2.lora_llama2", "finch.models.qwen3.lora_qwen3"):
        assert set(keys(LoraBuilder)) <= set(inspect.signature(locate(path, "model")).parameters)


# The JSON schemas, for editors


def problems(name, values):
    resources = [(path.name, referencing.Resource.from_contents(schema)) for path, schema in SCHEMAS.items()]
    schema = next(schema for path, schema in SCHEMAS.items() if path.name == f"{name}.schema.json")
    validator = jsonschema.Draft7Validator(schema, registry=referencing.Registry().with_resources(resources))
    return [error.json_path for error in validator.iter_errors(values)]


def test_json_schemas_are_up_to_date():
    assert {path.name: json.dumps(schema, indent=1) + "\n" for path, schema in SCHEMAS.items()} == {
        path.name: text for path, text in SCRIPT["texts"]().items()
    }
    assert set(SCRIPT["Grid"].model_fields) == set(grid.KEYS)
    assert set(SCRIPT["Evaluate"].model_fields) == set(grid.Evaluation.__dataclass_fields__)


@pytest.mark.parametrize(
    ("kind", "path"),
    [*(("finch", path) for path in config_names().values()), *(("grid", path) for path in grid_names().values())],
)
def test_shipped_files_name_their_schema_and_fit_it(kind, path):
    first, _, _ = path.read_text().partition("\n")
    named = first.removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / named).resolve() == ROOT / "finch" / "config" / f"{kind}.schema.json"
    assert problems(kind, yaml.safe_load(path.read_text())) == []


CONFIG = yaml.safe_load((ROOT / "configs" / "quickstart" / "finch.yaml").read_text())


@pytest.mark.parametrize(
    ("key", "accepted", "rejected"),
    [
        ("batch_size", [4, "${rows}", "???"], [0, "four", None]),
        ("clip_grad_norm", [1.0, "1e-5", "1.5E+3", None], ["x", 0]),
        ("epoch", [], [3]),
        ("data_root", ["/data", None], [3]),
        ("dtype", ["bf16", "${dtype}"], ["fp16"]),
        ("shuffle", [True, "${shuffle}"], [1]),
        ("checkpoint", [{"keep_last": 2}], [{"keep": 2}, {"keep_last": "two"}]),
        ("probes", [{"a": {"rows": 8}}], [{"a": {"row": 8}}]),
        ("loss", ["torch.nn.CrossEntropyLoss", {"_component_": "finch.objectives.TALR", "tau": "auto"}], [7]),
        ("lr_scheduler", [None, {"_component_": "my.Schedule", "x": 1}], [{"_component_": "finch.FinchLR", "x": 1}]),
        ("dataset", [[{"_component_": "finch.data.tofu.tofu_dataset", "weight": 1}]], [7]),
        (
            "dataset_validation",
            [{"a": {"_component_": "finch.data.rows.rows_dataset", "part": "all"}}],
            [{"a": {"_component_": "finch.data.rows.rows_dataset", "part": "some"}}],
        ),
        ("model", [{"_component_": "a.lora_b", "x": 1}], [{"_component_": "a.lora_b", "lora_rank": "x"}]),
        ("context_parallel_dim", [1], [2]),
    ],
)
def test_json_schema_of_configs_marks_mistakes(key, accepted, rejected):
    assert [value for value in accepted if problems("finch", {**CONFIG, key: value})] == []
    assert [value for value in rejected if not problems("finch", {**CONFIG, key: value})] == []


def test_json_schema_of_grids_marks_mistakes():
    values = {"config": "x", "out": "y", "grid": {"method": ["sft"], "optimizer.lr": [1e-5]}}
    assert problems("grid", values) == []
    assert problems("grid", {**values, "grid": [{"epochs": [1, 2]}], "overrides": {"epochs": 3}}) == []
    for wrong in ({"configs": "x"}, {"grid": {"epochs": ["x"]}}, {"grid": {"seed": 1}}, {"overrides": {"epochs": 0}}):
        assert problems("grid", {**values, **wrong}), wrong
    assert problems("grid", {"config": "x", "out": "y"})
