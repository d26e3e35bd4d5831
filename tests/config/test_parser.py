"""Reading and checking configs, without a run."""

import pytest
import yaml
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.config.instantiate import build
from finch.config.parser import read
from finch.config.resolved import redacted
from finch.config.schema import FULL_FINETUNE, REQUIRED, UNSUPPORTED_KEYS
from finch.config.validation import check
from finch.errors import UserError


def test_defaults_are_filled_in():
    cfg = check(OmegaConf.create(MINIMAL), FULL_FINETUNE)
    assert set(cfg) == set(FULL_FINETUNE)
    assert all(cfg[key] == option.default for key, option in FULL_FINETUNE.items() if option.default is not REQUIRED)


def test_every_option_has_a_sentence():
    assert all(len(option.help) > 20 for option in FULL_FINETUNE.values())


def test_keys_that_others_refer_to_are_the_users_own():
    config = {**MINIMAL, "data_root": "/data", "output_dir": "${data_root}/out"}
    assert check(OmegaConf.create(config), FULL_FINETUNE).output_dir == "/data/out"
    with pytest.raises(UserError, match=r"unknown key data_rot=/data"):
        check(OmegaConf.create({**MINIMAL, "data_rot": "/data"}), FULL_FINETUNE)


def test_a_key_of_the_users_own_survives_the_override_of_what_refers_to_it(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**MINIMAL, "name": "x", "output_dir": "out/${name}"}))
    assert read(["--config", str(file), "output_dir=elsewhere"], FULL_FINETUNE).output_dir == "elsewhere"


def test_the_command_line_overrides_the_file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(
        yaml.safe_dump({**MINIMAL, "epochs": 3, "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 1.0}})
    )
    cfg = read(
        ["--config", str(file), "epochs=5", "optimizer.lr=3e-4", "lr_scheduler=null", "loss=torch.nn.CrossEntropyLoss"],
        FULL_FINETUNE,
    )
    assert (cfg.epochs, cfg.optimizer.lr, cfg.lr_scheduler, cfg.loss["_component_"]) == (
        5,
        3e-4,
        None,
        "torch.nn.CrossEntropyLoss",
    )


def test_a_block_is_removed_like_any_key(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**MINIMAL, "lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": 1.0}}))
    assert read(["--config", str(file), "~lr_scheduler"], FULL_FINETUNE).lr_scheduler is None
    assert read([f"--config={file}", "lr_scheduler=null"], FULL_FINETUNE).lr_scheduler is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["epochs=2"], "--config NAME_OR_PATH is missing"),
        (["--config"], "--config NAME_OR_PATH is missing"),
        (["--config", "FILE", "--epochs", "2"], "Additional flag arguments not supported"),
        (["--config", "FILE", "output_dir=${nothing}"], "nothing"),
    ],
)
def test_command_lines_that_do_not_work(tmp_path, arguments, told):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(UserError, match=told):
        read([str(file) if argument == "FILE" else argument for argument in arguments], FULL_FINETUNE)


def test_a_file_that_is_not_yaml(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("a: [1\nb: 2")
    with pytest.raises(UserError, match="cannot be read as YAML"):
        read(["--config", str(file)], FULL_FINETUNE)


def test_a_key_left_open_is_named(tmp_path):
    with pytest.raises(UserError, match="data_root is not set: add data_root=VALUE"):
        read(["--config", "stories260k/tofu_finch"], FULL_FINETUNE)


@pytest.mark.parametrize("name", ["stories260k/tofu_finch", "stories260k/tofu_sft"])
def test_the_configs_of_finch_pass(name):
    cfg = read(["--config", name, "data_root=/data"], FULL_FINETUNE)
    assert cfg.output_dir == f"out/{name}"


def test_secrets_are_starred():
    cfg = OmegaConf.create(
        {
            "token": "s3cret-a",
            "dataset": {"hf_token": "s3cret-b", "api_key": "s3cret-c", "path": "at:${token}@x"},
            "rows": [{"password": "s3cret-d"}],
            "tokenizer": "e",
            "max_tokens": "f",
        }
    )
    shown = OmegaConf.to_yaml(redacted(cfg))
    assert "s3cret" not in shown
    assert "path: at:***@x" in shown
    assert "tokenizer: e" in shown
    assert "max_tokens: f" in shown


def test_a_component_that_fails_is_named_by_its_key():
    with pytest.raises(UserError, match=r"model: torchtune\.models\.llama2\.llama2 cannot be built: TypeError"):
        build({"_component_": "torchtune.models.llama2.llama2"}, "model")


def test_a_component_and_its_arguments_on_the_command_line(tmp_path):
    """Whether or not the file has the block."""
    file = tmp_path / "config.yaml"
    for block in ({}, {"loss": {"_component_": "torch.nn.CrossEntropyLoss"}}):
        file.write_text(yaml.safe_dump({**MINIMAL, **block}))
        for order in (
            ["loss=finch.objectives.STM", "loss.threshold=3.0"],
            ["loss.threshold=3.0", "loss=finch.objectives.STM"],
        ):
            assert read(["--config", str(file), *order], FULL_FINETUNE).loss == {
                "_component_": "finch.objectives.STM",
                "threshold": 3.0,
            }


@pytest.mark.parametrize("key", UNSUPPORTED_KEYS)
def test_torchtunes_keys_that_finch_does_not_have(key):
    """Their harmless value passes and is gone; any other is refused with a remedy."""
    refused = UNSUPPORTED_KEYS[key]
    assert key not in check(OmegaConf.create({**MINIMAL, key: refused.harmless}), FULL_FINETUNE)
    other = {None: 7, True: False, False: True}.get(refused.harmless, "other")
    with pytest.raises(UserError, match=rf"^{key}={other}: .*; "):
        check(OmegaConf.create({**MINIMAL, key: other}), FULL_FINETUNE)


def test_torchtunes_other_names_of_a_key():
    cfg = check(
        OmegaConf.create({**MINIMAL, "dataset_val": MINIMAL["dataset"], "run_val_every_n_steps": 5}), FULL_FINETUNE
    )
    assert (cfg.dataset_validation, cfg.validate_every_n_steps) == (MINIMAL["dataset"], 5)


@pytest.mark.parametrize(
    ("block", "told"),
    [
        ({"every_n_step": 5}, r"^unknown key checkpoint\.every_n_step=5, did you mean checkpoint\.every_n_steps\?"),
        ({"often": 5}, r"^unknown key checkpoint\.often=5; checkpoint takes every_n_steps, "),
        ({"every_n_steps": "five"}, r"^checkpoint\.every_n_steps=five must be int: "),
        ({"every_n_steps": 0}, r"^checkpoint\.every_n_steps=0 must be at least 1: "),
        ({"async": 1}, r"^checkpoint\.async=1 must be bool: "),
        ("often", r"^checkpoint=often must be a block with some of every_n_steps, "),
    ],
)
def test_a_block_without_a_component(block, told):
    filled = check(OmegaConf.create({**MINIMAL, "checkpoint": {"every_n_minutes": 0.5}}), FULL_FINETUNE).checkpoint
    assert filled == {"every_n_steps": None, "every_n_minutes": 0.5, "keep_last": 1, "async": True}
    with pytest.raises(UserError, match=told):
        check(OmegaConf.create({**MINIMAL, "checkpoint": block}), FULL_FINETUNE)
