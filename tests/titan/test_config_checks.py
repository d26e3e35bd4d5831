"""What a FINCH config of TorchTitan refuses, in one line and before anything is built."""

from __future__ import annotations

import dataclasses
from importlib import metadata

import pytest
import torch
import torch.distributed.checkpoint as dcp

from finch import titan
from finch.errors import UserError


@pytest.fixture
def plain(titan_configs):
    """TorchTitan's config of stories260k."""
    return titan_configs.plain


@pytest.fixture
def check(plain, tmp_path):
    """Changes a FINCH config, checks it, and returns the error."""
    from finch.titan import to_finch_config
    from finch.titan.config_checks import check_config

    def check_changed(change, **schedule):
        config = to_finch_config(plain(), **schedule)
        config.dump_folder = str(tmp_path)
        check_config(config)  # else the change is not what is refused
        change(config)
        with pytest.raises(UserError) as raised:
            check_config(config)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return check_changed


def setter(path, value):
    *parents, name = path.split(".")

    def change(config):
        for parent in parents:
            config = getattr(config, parent)
        setattr(config, name, value)

    return change


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("parallelism.spmd_backend", "full_dtensor", "parallelism.spmd_backend=full_dtensor is not supported"),
        ("parallelism.pipeline_parallel_degree", 2, "parallelism.pipeline_parallel_degree=2 is not supported"),
        ("lr_scheduler.warmup_steps", 5, "lr_scheduler.warmup_steps=5 is not supported: FINCH has neither warmup"),
        ("lr_scheduler.decay_ratio", 0.5, "lr_scheduler.decay_ratio=0.5 is not supported"),
        ("lr_scheduler.ema", 1.5, "lr_scheduler: ema=1.5"),
        ("lr_scheduler.init", "mean", "lr_scheduler: init='mean'"),
        ("lr_scheduler.eta_max", -1.0, "lr_scheduler: eta_max=-1.0"),
        ("hf_assets_path", "/nowhere", "hf_assets_path=/nowhere is not a folder"),
    ],
)
def test_setting_is_refused(check, path, value, message):
    assert message in check(setter(path, value))


def test_other_component_is_refused(check, plain):
    from torchtitan.components.loss import MSELoss

    assert "make the config with finch.titan.to_finch_config" in check(setter("lr_scheduler", plain().lr_scheduler))
    assert "FINCH needs the mean cross-entropy over the target tokens" in check(setter("loss", MSELoss.Config()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"objective": "TALR"}, "loss.tau=None"),
        ({"objective": "DFT", "tau": 1.0}, "loss.tau=1.0 belongs to TALR"),
        ({"objective": "FLOW"}, "loss.objective=FLOW must be DFT, TALR or EAFT"),
    ],
)
def test_objective_is_refused(check, arguments, message):
    from finch.titan.losses import ObjectiveLoss

    assert message in check(setter("loss", ObjectiveLoss.Config(**arguments)))


def test_other_model_is_refused(check):
    def drop_layer(config):
        config.model_spec.model.layers.pop()

    def scale_rope(config):
        for layer in config.model_spec.model.layers:
            layer.attention.rope = dataclasses.replace(layer.attention.rope, scaling="llama")

    assert "num_hidden_layers=5" in check(drop_layer)
    assert "rope" in check(scale_rope)


@pytest.mark.parametrize(
    ("state", "arguments", "message"),
    [
        ({"lr_scheduler": {"last_epoch": 3}}, {}, "load it with --checkpoint.exclude_from_loading lr_scheduler"),
        ({"lr_scheduler": {"last_epoch": 3}}, {"exclude_from_loading": ["lr_scheduler"]}, None),
        ({"lr_scheduler": {"last_epoch": 3}}, {"load_step": 4}, None),  # which there is not: TorchTitan's own error
        ({"lr_scheduler": {"ema_loss": 1.5}}, {}, None),
        ({"norm.weight": torch.ones(2)}, {}, "it holds only the model"),
    ],
)
def test_checkpoint_of_another_run_is_refused(plain, tmp_path, state, arguments, message):
    from finch.titan import to_finch_config
    from finch.titan.config_checks import check_config

    config = to_finch_config(plain())
    config.dump_folder = str(tmp_path)
    for name, value in arguments.items():
        setattr(config.checkpoint, name, value)
    dcp.save(state, checkpoint_id=str(tmp_path / "checkpoint/step-7"), no_dist=True)
    if message is None:
        check_config(config)
        return
    with pytest.raises(UserError, match=message):
        check_config(config)


def test_conversion_keeps_everything_else(plain):
    from finch.titan import to_finch_config

    before = plain()
    config = to_finch_config(before, eta_max=1e-2, ema=0.5)
    assert "FINCH" in type(config.lr_scheduler).__name__
    assert (config.lr_scheduler.eta_max, config.lr_scheduler.ema) == (1e-2, 0.5)
    for field in dataclasses.fields(before):
        if field.name != "lr_scheduler":
            assert getattr(config, field.name) is getattr(before, field.name), field.name
    assert type(before.lr_scheduler).__name__ == "Config"


def test_conversion_refuses_a_second_time_and_unknown_settings(plain):
    from finch.titan import to_finch_config

    with pytest.raises(UserError, match="config has FINCH already"):
        to_finch_config(to_finch_config(plain()))
    with pytest.raises(UserError, match="etamax=1 is no setting of FINCH; its settings are"):
        to_finch_config(plain(), etamax=1)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ("0.2.9", "torchtitan=0.2.9 is not supported: finch.titan needs >=0.3,<0.4"),
        ("0.3.0", None),
        ("0.3.7", None),
        ("0.4.0", "torchtitan=0.4.0 is not supported"),
        (None, r"which is not installed: pip install 'finch-finetune\[titan\]'"),
    ],
)
def test_version_is_checked(monkeypatch, installed, message):
    def version(name):
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(titan, "version", version)
    if message is None:
        titan.check_version()
        return
    with pytest.raises(UserError, match=message):
        titan.check_version()


@pytest.mark.parametrize(
    "name", ["finch_sft_llama3_8b", "finch_sft_llama3_1_8b", "finch_sft_qwen3_4b", "finch_sft_qwen3_8b"]
)
def test_packaged_config_is_a_finch_config(plain, name):
    from torchtitan.config import ConfigManager

    from finch.titan.config_checks import check_config

    config = ConfigManager().parse_args(["--module", "finch.titan", "--config", name, "--training.steps", "7"])
    assert type(config.lr_scheduler).__name__ == "FINCHConfig"
    assert (config.training.steps, config.lr_scheduler.init, config.lr_scheduler.eta_max) == (7, "dataset", 5e-5)
    with pytest.raises(UserError, match=r"hf_assets_path=\./assets/hf"):  # and nothing else
        check_config(config)
