"""From a command line to a config."""

import itertools
import json
import sys

import pytest
import yaml
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.config.parser import merge, parse, read, readable, save_for_ranks
from finch.config.schema import FullFinetuneKeys, LoraFinetuneKeys

FINCH = {"_component_": "finch.FinchLR", "eta_max": 1.0}


@pytest.fixture
def file(tmp_path):
    """A function that writes the minimal config with other top-level keys, and returns its path."""

    def write(**changes):
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**MINIMAL, **changes}))
        return str(path)

    return write


def test_read_overrides_the_file_from_the_command_line(file):
    path = file(epochs=3, lr_scheduler=FINCH)
    cfg = read(["--config", path, "epochs=5", "optimizer.lr=3e-4", "loss=torch.nn.CrossEntropyLoss"], FullFinetuneKeys)
    assert (cfg.epochs, cfg.optimizer.lr, cfg.lr_scheduler) == (5, 3e-4, FINCH)
    assert cfg.loss == {"_component_": "torch.nn.CrossEntropyLoss"}


def test_what_ranks_load_is_what_was_read(file, tmp_path):
    """Also references, a text that looks like one, secrets, a method's blocks; without keys that nothing refers to any more."""
    logger = {
        "_component_": "torchtune.training.metric_logging.WandBLogger",
        "log_dir": "${home}/logs",
        "key": "s3cret",
    }
    rows = {**MINIMAL["dataset"], "source": "${rows}", "column_map": {"input": r"\${x}"}}
    path = file(home="/data", rows="/rows.jsonl", metric_logger=logger, dataset=rows)
    cfg = read(["--config", path, "method=lora+finch", "dataset.source=json", "lr_scheduler.ema=0.5"])
    (tmp_path / "ranks").mkdir()
    again = read(["--config", str(save_for_ranks(cfg, tmp_path / "ranks"))])
    expected = OmegaConf.to_container(cfg, resolve=True)
    assert expected.pop("rows") == "/rows.jsonl"
    assert OmegaConf.to_container(again, resolve=True) == expected
    assert (again.dataset.column_map.input, again.metric_logger.key) == ("${x}", "s3cret")


@pytest.mark.parametrize(
    "block", [None, {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "x"}]
)
def test_a_metric_logger_is_one_word(file, block):
    """Its files lie in RUN/logs, unless the command line says otherwise."""
    path = file(metric_logger=block, output_dir="runs/${seed}", seed=3)
    torchtunes, ours = "torchtune.training.metric_logging", "finch.training.metric_loggers"
    for word, component in {
        "wandb": f"{torchtunes}.WandBLogger",
        "tensorboard": f"{torchtunes}.TensorBoardLogger",
        "trackio": f"{ours}.TrackioLogger",
        "csv": f"{ours}.CSVLogger",
    }.items():
        cfg = read(["--config", path, f"metric_logger={word}"])
        assert cfg.metric_logger == {"_component_": component, "log_dir": "runs/3/logs"}
        for words in itertools.permutations((f"metric_logger={word}", "metric_logger.log_dir=y")):
            assert read(["--config", path, *words]).metric_logger == {"_component_": component, "log_dir": "y"}
    cfg = read(["--config", path, "metric_logger=wandb", "metric_logger.project=mine"])
    assert cfg.metric_logger.project == "mine"


@pytest.mark.parametrize("key", ["max_seq_len", "max_length"])
def test_length_of_rows_is_the_tokenizers(file, key):
    """Unless the file has a key of that name."""
    assert read(["--config", file(), f"{key}=17"]).tokenizer.max_seq_len == 17
    tokenizer = {**MINIMAL["tokenizer"], "max_seq_len": f"${{{key}}}"}
    assert read(["--config", file(tokenizer=tokenizer, **{key: 5}), f"{key}=17"])[key] == 17


@pytest.mark.parametrize("override", ["~lr_scheduler", "lr_scheduler=null"])
def test_read_removes_a_block(file, override):
    assert read([f"--config={file(lr_scheduler=FINCH)}", override], FullFinetuneKeys).lr_scheduler is None


@pytest.mark.parametrize("block", [None, FINCH, {"decay": 0.1}])
def test_read_has_the_decay_of_a_constant_rate(file, block):
    for overrides in (["lr_scheduler=null", "lr_scheduler.decay=0.33"], ["lr_scheduler.decay=0.33", "~lr_scheduler"]):
        cfg = read(
            [f"--config={file(lr_scheduler=block)}", *(overrides[:1] if block == {"decay": 0.33} else overrides)]
        )
        assert cfg.lr_scheduler == {"decay": 0.33}


@pytest.mark.parametrize("block", [{}, {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}])
def test_read_merges_component_and_arguments(file, block):
    overrides = ["loss=finch.objectives.STM", "loss.threshold=3.0"]
    for order in (overrides, overrides[::-1]):
        cfg = read(["--config", file(**block), *order], FullFinetuneKeys)
        assert cfg.loss == {"_component_": "finch.objectives.STM", "threshold": 3.0}


def test_read_accepts_user_keys_whose_reference_is_overridden(file):
    path = file(name="x", output_dir="out/${name}")
    assert read(["--config", path, "output_dir=elsewhere"], FullFinetuneKeys).output_dir == "elsewhere"


@pytest.mark.parametrize(
    "text",
    [
        "Answer: briefly: now",
        "Answer: briefly",
        "a #b",
        "[",
        "*.x",
        "- a",
        "two\n\nlines",
        "a=b",
        "@",
        "%",
        "'",
        "2024-06-01",
    ],
)
def test_texts_are_taken_as_they_are(text):
    read_text = merge({"dataset": {"system": "a"}}, readable([f"dataset.system={text}"]))[0].dataset.system
    assert read_text == text
    assert merge({}, readable([f"x={json.dumps(text)}"]))[0].x == text


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("[a, b]", ["a", "b"]), ("{a: 1}", {"a": 1}), ("None", None), ("'5'", "5")]
)
def test_values_of_yaml_stay_values(text, value):
    assert merge({}, readable([f"x={text}"]))[0].x == value


@pytest.mark.parametrize("name", ["a = b, [1]: {c} $ #3", "*?!&", "[x]", "0010", "2024_01", "1e3", "null, x", "%"])
def test_paths_are_taken_as_they_are(file, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    overrides = [f"output_dir={name} not there, yet", f"tokenizer.path={tmp_path}/{name}", "epochs=1"]
    cfg = read(["--config", file(), *overrides], FullFinetuneKeys)
    assert (cfg.output_dir, cfg.tokenizer.path, cfg.epochs) == (f"{name} not there, yet", f"{tmp_path}/{name}", 1)
    assert read(["--config", file(), f"output_dir={name}"], FullFinetuneKeys).output_dir == name
    (tmp_path / "${x}").mkdir()
    with pytest.raises(UserError, match="another key's value; rename it, or name a link"):
        read(["--config", file(), "tokenizer.path=${x}"], FullFinetuneKeys)


def test_key_that_is_given_twice_is_named(file, caplog):
    assert read(["--config", file(), "epochs=3", "epochs=4"], FullFinetuneKeys).epochs == 4
    assert caplog.messages == ["epochs on the command line more than once: the last value is taken"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["epochs=2"], "--config NAME_OR_PATH is missing"),
        (["--config"], "--config NAME_OR_PATH is missing"),
        (["--config", "FILE", "--epochs", "2"], "^--epochs is no option; overrides are key=value"),
        (["--config", "x" * 300], "is neither a file nor a config of finch"),
        (["--config", "sweeps/quickstart"], "^sweeps/quickstart is a grid: finch sweep sweeps/quickstart"),
        (["--config", "FILE", "output_dir=${nothing}"], "nothing"),
        (["--config", "BROKEN"], "cannot be read as YAML"),
        (["--config", "FILE", "epochs=[1"], r"^epochs=\[1 must be int"),
        (["--config", "stories260k/tofu_finch"], "data_root is not set: add data_root=VALUE"),
    ],
)
def test_read_rejects_command_line(file, tmp_path, arguments, message):
    (tmp_path / "broken.yaml").write_text("a: [1\nb: 2")
    paths = {"FILE": file(), "BROKEN": str(tmp_path / "broken.yaml")}
    with pytest.raises(UserError, match=message):
        read([paths.get(argument, argument) for argument in arguments], FullFinetuneKeys)


@pytest.mark.parametrize(
    ("arguments", "recipe", "model"),
    [(["-h"], "full", FullFinetuneKeys), (["--config", "anything", "--help"], "lora", LoraFinetuneKeys)],
)
def test_recipe_help(capsys, monkeypatch, arguments, recipe, model):
    @parse(model)
    def main(cfg):
        raise AssertionError("started a run")

    monkeypatch.setattr(sys, "argv", [f"/path/finch_{recipe}_finetune.py", *arguments])
    main()
    printed = capsys.readouterr().out
    assert f"finch_{recipe}_finetune --config NAME_OR_PATH [key=value ...] [~key] [method=NAME]" in printed
    assert set(model.model_fields) <= set(printed.split())
    assert ("save_adapter_weights_only" in printed) == (recipe == "lora")
    assert all(f"`finch list {command}`" in printed for command in ("configs", "keys", "methods"))
    assert max(map(len, printed.splitlines())) <= 120
    monkeypatch.setenv("RANK", "1")
    main()
    assert capsys.readouterr().out == ""
