"""What a FINCH config of TorchTitan refuses, in one line and before anything is built."""

import dataclasses
import functools
import json
import re
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.runs import ROOT
from safetensors.torch import load_file, save_file

from finch.base.errors import UserError
from finch.integrations import titan


@pytest.fixture
def plain(titan_configs):
    """TorchTitan's config of stories260k."""
    return titan_configs.plain


@pytest.fixture
def finch_config(plain, tmp_path):
    from finch.integrations.titan import to_finch_config

    def make():
        config = to_finch_config(plain())
        config.dump_folder = str(tmp_path)
        return config

    return make


@pytest.fixture
def check(finch_config):
    """Changes a setting of a FINCH config, by a value or by a function of the old one, checks the config, and returns the error."""
    from finch.integrations.titan.config_checks import check_config

    def check_changed(path, value):
        config = finch_config()
        check_config(config)  # else the change is not what is refused
        *parents, name = path.split(".")
        parent = functools.reduce(getattr, parents, config)
        setattr(parent, name, value(getattr(parent, name)) if callable(value) else value)
        with pytest.raises(UserError) as raised:
            check_config(config)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return check_changed


LINEAR = SimpleNamespace(in_features=1)
THREE_RANKS = {"lr_scheduler": {"ema_loss": 1.5}, "dataloader": {f"dp_rank_{rank}": b"" for rank in range(3)}}


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("parallelism.spmd_backend", "full_dtensor", "parallelism.spmd_backend=full_dtensor is not supported"),
        ("parallelism.pipeline_parallel_degree", 2, "parallelism.pipeline_parallel_degree=2 is not supported"),
        ("training.enable_cpu_offload", True, "training.enable_cpu_offload=True is not supported"),
        ("lr_scheduler.decay_type", "sqrt", "lr_scheduler.decay_type=sqrt is not supported: FINCH's decay is linear"),
        ("lr_scheduler.decay_ratio", 1.0, "lr_scheduler: decay=1.0 must lie in [0, 1)"),
        ("lr_scheduler.ema", 1.5, "lr_scheduler: ema=1.5"),
        ("hf_assets_path", "/nowhere", "hf_assets_path=/nowhere is not a folder"),
        ("training.max_norm", 0.0, "training.max_norm=0.0 makes every gradient 0 in TorchTitan"),
        ("loss", {"objective": "TALR"}, "loss.tau=None"),
        ("loss", {"objective": "DFT", "tau": 1.0}, "loss.tau=1.0 belongs to TALR"),
        ("loss", {"objective": "FLOW"}, "loss.objective=FLOW must be DFT, TALR or EAFT"),
        (
            "self_replay",
            {"strengths": 1.0},
            "unknown key self_replay.strengths=1.0, did you mean self_replay.strength?",
        ),
        ("probes", {"own": {"kind": "text"}}, "probes.own has no rows"),
        (
            "forgetting_budget",
            {"probe": "own", "max_increase": 0.1},
            "forgetting_budget.probe=own: there are no probes",
        ),
        ("model_spec.model", LINEAR, "model_spec=llama3 test is no text decoder"),
        ("model_spec.model.layers", lambda layers: layers[:-1], "num_hidden_layers=5"),
    ],
)
def test_setting_is_refused(check, path, value, message):
    from finch.integrations.titan.losses import ObjectiveLoss

    assert message in check(path, ObjectiveLoss.Config(**value) if path == "loss" else value)


@pytest.mark.parametrize(
    ("block", "name", "value", "message"),
    [
        ("checkpoint", "initial_load_in_hf", False, "self_replay: what the pretrained model answers is measured"),
        ("parallelism", "context_parallel_degree", 2, "context_parallel_degree=2 is not supported with self_replay"),
        ("training", "disable_cuda_graphs", False, "disable_cuda_graphs=False is not supported with self_replay"),
        ("parallelism", "spmd_backend", "spmd_types", "spmd_backend=spmd_types with tensor parallel is not supported"),
    ],
)
def test_setting_is_refused_with_self_replay(finch_config, block, name, value, message):
    from finch.integrations.titan.config_checks import check_config

    config = finch_config()
    config.parallelism.tensor_parallel_degree = 2
    setattr(getattr(config, block), name, value)
    check_config(config)
    config.self_replay = {"strength": 0.3}
    with pytest.raises(UserError, match=message):
        check_config(config)


def test_preserve_has_the_recipes_settings_and_takes_options(plain):
    from torchtitan.config import ConfigManager

    from finch.config.methods import METHODS
    from finch.config.schema import SelfReplay
    from finch.integrations.titan import to_finch_config

    settings = SelfReplay(**METHODS["preserve"].blocks["self_replay"]).model_dump()
    assert to_finch_config(plain(), preserve=True).self_replay.items() <= settings.items()
    arguments = ["--module", "helpers.titan_configs", "--config", "preserving", "--self_replay.strength", "1.0"]
    assert ConfigManager().parse_args(arguments).self_replay["strength"] == 1.0


@pytest.mark.parametrize("total_steps", [None, 6])
def test_decay_is_torchtitans(total_steps):
    """At a loss of 1 nat: its ``decay_ratio`` of ``total_steps``, or of the training's."""
    from torchtitan.components.optimizer import LRSchedulersContainer

    from finch.integrations.titan.lr_scheduler import FinchLRSchedulersContainer

    rates = []
    for cls in (FinchLRSchedulersContainer, LRSchedulersContainer):
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-5)
        config = cls.Config(warmup_steps=0, decay_ratio=0.5, total_steps=total_steps)
        schedule, own = config.build(optimizers=[optimizer], training_steps=8), []
        for _ in range(6):
            if cls is FinchLRSchedulersContainer:
                schedule.set_lr(torch.tensor(1.0), torch.tensor(3))
            own.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
        rates.append(own)
    assert rates[0] == pytest.approx(rates[1])
    assert rates[0][-1] < rates[0][0]


@pytest.mark.parametrize(
    ("ranks", "sizes", "is_refused"),
    [
        (2, {"data_parallel_replicate": 3}, True),
        (4, {"data_parallel_replicate": 2, "data_parallel_shard": 1}, True),
        (4, {"data_parallel_shard": 0}, True),
        (4, {"data_parallel_replicate": 2, "tensor_parallel": 2}, False),
        (4, {"data_parallel_shard": 2, "context_parallel": 2}, False),
    ],
)
def test_mesh_that_does_not_divide_over_the_ranks_is_refused(finch_config, monkeypatch, ranks, sizes, is_refused):
    from finch.integrations.titan.config_checks import check_config

    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    config = finch_config()
    for name, size in sizes.items():
        setattr(config.parallelism, f"{name}_degree", size)
    with pytest.raises(UserError, match=rf"does not divide over {ranks} ranks") if is_refused else nullcontext():
        check_config(config)


def test_other_component_is_refused(check, plain):
    from torchtitan.components.loss import MSELoss

    assert "make the config with finch.titan.to_finch_config" in check("lr_scheduler", plain().lr_scheduler)
    assert "FINCH needs the mean cross-entropy over the target tokens" in check("loss", MSELoss.Config())


def test_pass_over_other_rows_is_refused(check):
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    message = check("dataloader", HuggingFaceTextDataLoader.Config())
    assert "lr_scheduler.init=dataset would read all of HuggingFaceTextDataLoader.Config" in message


@pytest.mark.parametrize(("module", "lost"), [("wo", "layers.0.attention.wo.lora_a"), ("lm_head", "lm_head.lora_a")])
def test_lora_is_refused(check, module, lost):
    """TorchTitan trains it, and exports the pretrained model."""
    from torchtitan.components.lora import LoRAConverter

    converter = LoRAConverter.Config(rank=2, target_modules=[module]).build()
    message = check("model_spec.model", converter.convert)
    assert f"weights, such as {lost}.weight, out of Hugging Face folders" in message


@pytest.mark.parametrize("is_indexed", [False, True])
@pytest.mark.parametrize(
    ("extra", "is_refused"),
    [
        ("model.layers.0.self_attn.q_proj.bias", True),  # Qwen2's
        ("score.weight", True),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", False),
        ("model.layers.5.mlp.up_proj.weight", False),  # after the last one, as DeepSeek-V3's
    ],
)
def test_weights_that_the_model_does_not_take_are_refused(finch_config, tmp_path, extra, is_refused, is_indexed):
    from finch.integrations.titan.config_checks import check_config

    config = finch_config()
    folder = Path(config.hf_assets_path)
    weights = {**load_file(folder / "model.safetensors"), extra: torch.zeros(2)}
    save_file({extra: weights[extra]} if is_indexed else weights, tmp_path / "model.safetensors")
    if is_indexed:
        index = {"weight_map": dict.fromkeys(weights, "model.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    config.hf_assets_path = str(tmp_path)
    message = f"{tmp_path} has 1 weights, such as {extra}, that the model llama3 test does not take"
    with pytest.raises(UserError, match=re.escape(message)) if is_refused else nullcontext():
        check_config(config)


def test_random_weights_are_named(finch_config, caplog):
    from finch.integrations.titan.config_checks import check_config

    for is_loaded in (True, False):
        config = finch_config()
        config.checkpoint.initial_load_in_hf = is_loaded
        check_config(config)
        assert ("the model starts with random weights" in caplog.text) is not is_loaded


def test_scaled_rope_is_refused(check):
    def scale(layers):
        for layer in layers:
            layer.attention.rope = dataclasses.replace(layer.attention.rope, scaling="llama")
        return layers

    assert "rope" in check("model_spec.model.layers", scale)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "has factor=32.0, and the model llama3 test 8.0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "has rope_type=linear, and the model llama3 test llama"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rms_norm_eps": 0.5}, "has rms_norm_eps=0.5"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "tie_word_embeddings": "other"},
            "tie_word_embeddings=",
        ),
        *(
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, key: value}, f"has {key}={value}, and the model")
            for key, value in (
                ("num_attention_heads", 4),
                ("num_key_value_heads", 8),
                ("head_dim", 16),
                ("attention_bias", True),
            )
        ),
    ],
)
def test_folder_of_another_model_is_refused(changes, message, finch_config, tmp_path):
    """Such as Llama 3.2's, whose factor is not that of TorchTitan's sizes of the same name."""
    from finch.integrations.titan.config_checks import check_config

    settings = json.loads((Path(finch_config().hf_assets_path) / "config.json").read_text())
    is_tied = settings.get("tie_word_embeddings", False)
    if changes.get("tie_word_embeddings") == "other":
        changes = {**changes, "tie_word_embeddings": not is_tied}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "tie_word_embeddings": is_tied, **changes}))

    def move(model):
        for layer in model.layers:
            layer.attention.rope = dataclasses.replace(layer.attention.rope, scaling="llama")
        model.enable_weight_tying = is_tied
        return model

    config = finch_config()
    config.model_spec.model, config.hf_assets_path = move(config.model_spec.model), str(tmp_path)
    with pytest.raises(UserError, match=re.escape(message)):
        check_config(config)


def test_own_rows_are_validated_on_as_well(check, titan_configs):
    from torchtitan.components.validate import Validator

    from finch.integrations.titan.dataloader import RowsDataLoader

    tofu = Validator.Config(enable=True, dataloader=RowsDataLoader.Config(source="locuslab/TOFU", is_packed=False))
    assert "add --validator.dataloader.source None --validator.dataloader.data_files /" in check("validator", tofu)


def test_rows_that_end_before_the_last_step_are_refused(finch_config, monkeypatch):
    """TorchTitan saves nothing after them."""
    from torchtitan.trainer import Trainer

    from finch.integrations.titan import FinchTrainer

    def build(self, config):
        self.dataloader, self.gradient_accumulation_steps = SimpleNamespace(rounds_per_epoch=8), 3

    monkeypatch.setattr(Trainer, "__init__", build)
    config = finch_config()
    config.dataloader.infinite, config.training.steps = False, 3
    with pytest.raises(UserError, match=r"^training.steps=3: with dataloader.infinite=False there are 2; set that"):
        FinchTrainer(config)


def test_packed_rows_need_an_attention_that_keeps_them_apart(check):
    assert "dataloader.is_packed=True: the model's attention" in check("dataloader.is_packed", True)


@pytest.mark.parametrize(
    ("state", "arguments", "message"),
    [
        ({"lr_scheduler": {"last_epoch": 3}}, {}, "load it with --checkpoint.exclude_from_loading lr_scheduler"),
        ({"lr_scheduler": {"last_epoch": 3}}, {"exclude_from_loading": ["lr_scheduler"]}, None),
        ({"lr_scheduler": {"last_epoch": 3}}, {"load_step": 4}, None),  # which there is not: TorchTitan's own error
        ({"lr_scheduler": {"ema_loss": 1.5}}, {}, None),
        ({"norm.weight": torch.ones(2)}, {}, "it holds only the model"),
        (THREE_RANKS, {}, r"step-7 is of 3 data-parallel ranks, and this run has 2: .*; start 3, or the rows anew"),
        (THREE_RANKS, {"exclude_from_loading": ["dataloader"]}, None),
    ],
)
def test_checkpoint_of_another_run_is_refused(finch_config, tmp_path, monkeypatch, state, arguments, message):
    from finch.integrations.titan.config_checks import check_config

    monkeypatch.setenv("WORLD_SIZE", "4")
    config = finch_config()
    config.parallelism.tensor_parallel_degree = 2
    for name, value in arguments.items():
        setattr(config.checkpoint, name, value)
    dcp.save(state, checkpoint_id=str(tmp_path / "checkpoint/step-7"), no_dist=True)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        check_config(config)


@pytest.mark.parametrize("is_hf", [False, True])
def test_run_that_ends_with_a_model_only(finch_config, tmp_path, caplog, is_hf):
    """Started again it has nothing to do; with more steps it names what can be resumed."""
    from finch.integrations.titan import FinchTrainer

    for step, state in ((4, {"lr_scheduler": {"ema_loss": 1.5}}), (7, {"norm.weight": torch.ones(2)})):
        dcp.save(state, checkpoint_id=str(tmp_path / f"checkpoint/step-{step}"), no_dist=True)
    if is_hf:
        (tmp_path / "checkpoint/step-7/.metadata").unlink()
        for name in ("model.safetensors.index.json", "config.json"):
            (tmp_path / "checkpoint/step-7" / name).write_text("{}")
    config = finch_config()
    config.training.steps = 7
    with pytest.raises(SystemExit) as ended:
        FinchTrainer(config)
    assert ended.value.code == 0
    assert "nothing to do: 7 steps have ended" in caplog.text
    config.training.steps = 9
    with pytest.raises(UserError, match=r"holds only the model, .*; resume with --checkpoint.load_step 4, or start"):
        FinchTrainer(config)


def test_conversion_keeps_everything_else(plain):
    from finch.integrations.titan import to_finch_config

    before = plain()
    config = to_finch_config(before, eta_max=1e-2, ema=0.5)
    assert "FINCH" in type(config.lr_scheduler).__name__
    assert (config.lr_scheduler.eta_max, config.lr_scheduler.ema) == (1e-2, 0.5)
    for field in dataclasses.fields(before):
        if field.name != "lr_scheduler":
            assert getattr(config, field.name) is getattr(before, field.name), field.name
    assert type(before.lr_scheduler).__name__ == "Config"


def test_conversion_refuses_a_second_time_and_unknown_settings(plain):
    from finch.integrations.titan import to_finch_config

    with pytest.raises(UserError, match="config has FINCH already"):
        to_finch_config(to_finch_config(plain()))
    with pytest.raises(UserError, match="etamax=1 is no setting of FINCH; its settings are"):
        to_finch_config(plain(), etamax=1)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ("0.2.9", "torchtitan=0.2.9 is not supported: finch.titan needs >=0.3,<0.4"),
        ("0.3.7", None),
        ("0.4.0", "torchtitan=0.4.0 is not supported"),
        (None, r"which is not installed: pip install .*\[titan\]"),
    ],
)
def test_version_is_checked(monkeypatch, installed, message):
    version = mock.Mock(return_value=installed, side_effect=None if installed else metadata.PackageNotFoundError)
    monkeypatch.setattr(titan, "version", version)
    with pytest.raises(UserError, match=message) if message else nullcontext():
        titan.check_version()


def test_config_of_the_page_is_a_finch_config(plain):
    from finch.integrations.titan.config_checks import check_config

    names = {}
    exec((ROOT / "docs/titan.md").read_text().split("```python\n", 1)[1].split("```", 1)[0], names)
    config = names["my_run"]()
    assert config.optimizer.param_groups[0].optimizer_kwargs["lr"] < config.lr_scheduler.eta_max
    assert config.parallelism.spmd_backend == "partial_dtensor"
    with pytest.raises(UserError, match=r"hf_assets_path=\./assets/hf"):  # whose weights it takes
        check_config(config)


@pytest.mark.parametrize(
    "name", ["finch_sft_llama3_8b", "finch_sft_llama3_1_8b", "finch_sft_qwen3_4b", "finch_sft_qwen3_8b"]
)
def test_packaged_config_is_a_finch_config(plain, name):
    from torchtitan.config import ConfigManager

    from finch.integrations.titan.config_checks import check_config

    config = ConfigManager().parse_args(["--module", "finch.titan", "--config", name, "--training.steps", "7"])
    assert type(config.lr_scheduler).__name__ == "FINCHConfig"
    assert (config.training.steps, config.lr_scheduler.init, config.lr_scheduler.eta_max) == (7, "dataset", 5e-5)
    with pytest.raises(UserError, match=r"hf_assets_path=\./assets/hf"):  # and nothing else
        check_config(config)
