"""method=NAME, without a run: the config it makes, and the errors."""

import re

import pytest
import torch
import yaml
from helpers.runs import MINIMAL, ROOT
from helpers.runs import finch as finch_command
from omegaconf import OmegaConf
from torchtune.training.lr_schedulers import get_cosine_schedule_with_warmup

from finch.base.errors import UserError
from finch.config.instantiate import config_names, locate
from finch.config.methods import METHODS
from finch.config.parser import merge, read
from finch.config.schema import FullFinetuneKeys, LoraFinetuneKeys
from finch.optim.torch_lr import cosine_with_warmup

COSINE = {"_component_": "finch.cosine.cosine_with_warmup", "warmup_fraction": 0.05}
CROSS_ENTROPY = {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}
FINCH = {"_component_": "finch.FinchLR", "eta_max": 5e-5, "ema": 0.9, "init": "dataset"}
L2 = {"_component_": "finch.regularization.L2", "strength": 1e-3}
KL = {"_component_": "finch.regularization.KL", "strength": 0.1, "reference": "online"}


def objective(name):
    return {"_component_": f"finch.objectives.{name}"}


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    return file


def merged(*overrides, **changes):
    """The config as plain values; ``changes`` replace top-level keys of the minimal one."""
    return OmegaConf.to_container(merge({**MINIMAL, **changes}, list(overrides))[0], resolve=True)


@pytest.mark.parametrize(
    ("name", "lr_scheduler", "loss", "regularizer", "kl_penalty"),
    [
        ("sft", COSINE, CROSS_ENTROPY, None, None),
        ("finch", FINCH, CROSS_ENTROPY, None, None),
        ("flow", COSINE, objective("FLOW"), None, None),
        ("dft", COSINE, objective("DFT"), None, None),
        ("talr", COSINE, objective("TALR"), None, None),
        ("stm", COSINE, objective("STM"), None, None),
        ("eaft", COSINE, objective("EAFT"), None, None),
        ("l2", COSINE, CROSS_ENTROPY, L2, None),
        ("kl", COSINE, CROSS_ENTROPY, None, KL),
        ("asft", COSINE, objective("DFT"), None, KL),
        ("wise_ft", COSINE, CROSS_ENTROPY, None, None),
        ("stm+finch+l2", FINCH, objective("STM"), L2, None),
        ("l2+asft", COSINE, objective("DFT"), L2, KL),
    ],
)
def test_method_sets_five_blocks_and_nothing_else(name, lr_scheduler, loss, regularizer, kl_penalty):
    other = {"lr_scheduler": {"_component_": "x.Y", "z": 1}, "loss": {"_component_": "x.L"}}
    other |= {"regularizer": {"_component_": "x.R"}, "kl_penalty": {"_component_": "x.K"}}
    before = {**MINIMAL, **other, "self_replay": {"rows": 3}}
    blocks = {"lr_scheduler": lr_scheduler, "loss": loss, "regularizer": regularizer, "kl_penalty": kl_penalty}
    blocks["self_replay"] = None
    assert merged(f"method={name}", **before) == {**before, **blocks}
    if name != "sft":
        replay = merged(f"method={name}+self_replay", "self_replay.share=0.5", **before)
        assert replay == {**before, **blocks, "self_replay": {"rows": 3, "share": 0.5}}  # the file's settings stay
    assert merged(method=name) == {**MINIMAL, **blocks}  # from the file


def test_method_precedence_file_method_command_line():
    assert merged("method=dft", method="talr")["loss"] == objective("DFT")
    assert merged("~method", method="talr") == MINIMAL
    assert merged("method=null", method="talr") == MINIMAL
    cfg = merged("loss.w_min=0.1", "lr_scheduler=null", "regularizer.strength=0.5", method="talr+l2")
    assert cfg["loss"] == {**objective("TALR"), "w_min": 0.1}
    assert cfg["lr_scheduler"]["_component_"] is None
    assert cfg["regularizer"]["strength"] == 0.5
    assert merged("method=dft", "loss=finch.objectives.STM")["loss"] == objective("STM")


@pytest.mark.parametrize("name", ["sft", "finch+l2"])
def test_a_key_of_a_block_that_the_method_leaves_out_is_refused(name):
    """It would make the whole block: sft that replays, under sft's name in a sweep's report."""
    with pytest.raises(UserError, match=r"self_replay.cache=answers: method=.* has no self_replay; give") as error:
        merged(f"method={name}", "self_replay.cache=answers")
    assert f"method={'self_replay' if name == 'sft' else 'finch+l2+self_replay'}," in str(error.value)
    with pytest.raises(UserError, match=r"kl_penalty.strength=1: .* has no kl_penalty; leave it out"):
        merged(f"method={name}", "kl_penalty.strength=1")
    assert merged("self_replay.cache=answers")["self_replay"] == {"cache": "answers"}  # no method says otherwise
    assert merged(f"method={name}", "self_replay={}", "self_replay.rows=8")["self_replay"] == {
        "rows": 8
    }  # the block is asked for


def test_a_file_that_names_a_method_and_a_block_without_it_is_refused():
    for method, key, block, what in (
        ("finch", "self_replay", {"rows": 8}, "leaves it out"),
        ("dft", "lr_scheduler", FINCH, "takes finch.cosine.cosine_with_warmup in its place"),
        ("finch", "loss", objective("DFT"), "takes torchtune.modules.loss.CEWithChunkedOutputLoss in its place"),
    ):
        with pytest.raises(UserError, match=f"{key}: method={method} in the same file {what}; take one of them out"):
            merged(method=method, **{key: block})
    assert (
        merged("method=finch", method="kl", self_replay={"rows": 8})["self_replay"] is None
    )  # the command line's method


def test_method_block_can_be_removed(file):
    for name in ("sft", "finch", "lr_replay"):
        cfg = read(["--config", str(file), f"method={name}", "~lr_scheduler"], FullFinetuneKeys)
        assert cfg.lr_scheduler is None
        assert "method" not in cfg


def test_method_keeps_settings_of_the_same_component():
    own = {"_component_": "finch.objectives.TALR", "w_min": 0.2}
    assert merged("method=talr", loss=own)["loss"] == own
    assert merged("method=stm", loss=own)["loss"] == objective("STM")
    assert merged("method=preserve", average="auto")["average"] == "auto"  # as its own run's config has it
    replay = {"rows": 8, "max_new_tokens": 9}
    assert merged("method=preserve", self_replay=replay)["self_replay"] == {
        "rows": 1024, "share": 1.0, "strength": 1.0, "max_new_tokens": 9,
    }  # fmt: skip
    assert merged(method="preserve", self_replay=replay)["self_replay"] == {"share": 1.0, "strength": 1.0, **replay}
    for loss in ("torch.nn.CrossEntropyLoss", {"_component_": "torch.nn.CrossEntropyLoss"}):
        assert merged("method=sft", loss=loss)["loss"] == {"_component_": "torch.nn.CrossEntropyLoss"}


@pytest.mark.parametrize("rate", [5e-6, 1e-5, 2e-5, 3e-5, 5e-5, 1e-4])
def test_finch_cap_is_the_papers_at_each_of_its_rates(rate):
    assert merged("method=finch", f"optimizer.lr={rate}")["lr_scheduler"] == FINCH


@pytest.mark.parametrize(
    ("override", "eta_max"),
    [("optimizer.lr=3e-4", 7e-5), ("lr_scheduler.eta_max=1", 1), ("lr_scheduler.eta_max=auto", "auto")],
)
def test_finch_keeps_an_eta_max_that_is_written(override, eta_max):
    block = {"_component_": "finch.FinchLR", "eta_max": 7e-5, "ema": 0.8, "init": 3.0, "eps": 1e-6}
    assert merged("method=finch", override, lr_scheduler=block)["lr_scheduler"] == {**block, "eta_max": eta_max}


@pytest.mark.parametrize(
    ("method", "rate"), [("lora", 2e-4), ("finch+lora", 2e-4), ("small_lr", 1e-6), ("small_lr+lora", 2e-5)]
)
def test_method_has_its_own_rate_unless_given(method, rate):
    assert merged(f"method={method}")["optimizer"]["lr"] == rate
    assert merged(f"method={method}", "optimizer.lr=3e-3")["optimizer"]["lr"] == 3e-3
    if method.endswith("lora") and method != "small_lr+lora":
        assert merged(method=method)["optimizer"] == MINIMAL["optimizer"]  # given next to the method


def test_replay_requires_a_log(file):
    cfg = merged("method=lr_replay+dft", "lr_scheduler.log=out/run")
    assert cfg["lr_scheduler"] == {"_component_": "finch.ReplayLR", "log": "out/run"}
    assert cfg["loss"] == objective("DFT")
    with pytest.raises(UserError, match=r"lr_scheduler\.log is missing: the earlier run whose"):
        read(["--config", str(file), "method=lr_replay"], FullFinetuneKeys)


@pytest.mark.parametrize(
    ("full", "lora"),
    [
        ("torchtune.models.llama3.llama3_8b", "torchtune.models.llama3.lora_llama3_8b"),
        ("finch.models.qwen3.qwen3_4b_instruct", "finch.models.qwen3.lora_qwen3_4b_instruct"),
        ("finch.models.qwen3.qwen3", "finch.models.qwen3.lora_qwen3"),
        ("torchtune.models.llama2.lora_llama2_7b", "torchtune.models.llama2.lora_llama2_7b"),
    ],
)
def test_lora_replaces_the_model_builder(full, lora):
    assert callable(locate(lora, "model"))
    expected = {"_component_": lora, "lora_attn_modules": ["q_proj", "k_proj", "v_proj", "output_proj"]}
    expected |= {"apply_lora_to_mlp": True, "lora_rank": 64, "lora_alpha": 64, "lora_dropout": 0.0}
    assert merged("method=lora", model={"_component_": full})["model"] == expected
    cfg = merged("method=finch+lora", f"model={full}", "model.lora_rank=8")
    assert cfg["model"] == {**expected, "lora_rank": 8}
    schedule = {**FINCH, "eta_max": "auto"}  # LoRA's rate lies above the cap of full fine-tuning
    assert (cfg["lr_scheduler"], cfg["loss"], cfg["regularizer"]) == (schedule, CROSS_ENTROPY, None)
    assert merged("method=finch+lora", "lr_scheduler.eta_max=1e-4")["lr_scheduler"]["eta_max"] == 1e-4


def test_full_recipe_rejects_lora_with_the_right_command(file):
    file.write_text(yaml.safe_dump({**MINIMAL, "method": "lora"}))
    with pytest.raises(UserError, match=f"finch run {file} epochs=2"):
        read(["--config", str(file), "epochs=2"], FullFinetuneKeys)
    assert read(["--config", str(file)], LoraFinetuneKeys).model["_component_"].endswith(".lora_llama2_7b")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("replay", "method=replay is not known, did you mean lr_replay?"),
        ("finch+xyz", "method=finch+xyz is not known; known are sft, small_lr, finch"),
        ("talr+dft", "method=talr+dft: talr and dft both set loss; name one of them"),
        ("finch+lr_replay", "finch and lr_replay both set lr_scheduler"),
        ("small_lr+lr_replay", "method=small_lr+lr_replay: lr_replay takes its rates from a log"),
        ("l2+l2", "names l2 more than once"),
        ("finch+", "is not known"),
    ],
)
def test_read_rejects_method_names(file, name, message):
    with pytest.raises(UserError, match=re.escape(message)):
        read(["--config", str(file), f"method={name}"], FullFinetuneKeys)


@pytest.mark.parametrize("name", [name for name in config_names() if name != "auto"])  # needs a model's folder
def test_every_config_accepts_every_method(name):
    """All of a model's FINCH config; of its others, and the quickstart's, those that add blocks or change the builder."""
    given = [f"{key}=/x" for key, value in yaml.safe_load(config_names()[name].read_text()).items() if value == "???"]
    for method in METHODS if name.endswith("_finch") else ("sft", "preserve", "lora"):
        log = ["lr_scheduler.log=/x"] if method == "lr_replay" else []
        options = LoraFinetuneKeys if method == "lora" else FullFinetuneKeys
        cfg = read(["--config", name, f"method={method}", *given, *log], options)
        assert "method" not in cfg
        assert cfg.output_dir == f"out/{name}"


def test_log_method_names_blocks_and_next_command(file, caplog):
    with caplog.at_level("INFO", logger="finch"):
        read(["--config", str(file), "method=wise_ft+finch", "epochs=3", "output_dir=run"], FullFinetuneKeys)
    assert "method=wise_ft+finch: lr_scheduler finch.FinchLR, loss torchtune" in caplog.text
    assert "finch average --base x --tuned run/epoch_2 --out run/wise_ft" in caplog.text


def test_finch_methods_and_configs_show(capsys):
    code, out, _ = finch_command(capsys, "list", "methods")
    assert code == 0
    assert sorted(set(METHODS) & {line.split()[0] for line in out.splitlines() if line}) == sorted(METHODS)
    shown = ("list", "--show", "qwen3/4B_finch")
    cfg = yaml.safe_load(finch_command(capsys, *shown, "method=talr", "~clip_grad_norm")[1])
    assert (cfg["loss"], cfg["lr_scheduler"], "method" in cfg) == (objective("TALR"), COSINE, False)
    cfg = yaml.safe_load(finch_command(capsys, *shown, "method=lora")[1])
    assert (cfg["model"]["lora_rank"], cfg["save_adapter_weights_only"]) == (64, False)


@pytest.mark.parametrize(("steps", "fraction", "warmup"), [(100, 0.05, 5), (75, 0.05, 4), (20, 0.05, 1), (50, 0, 0)])
def test_cosine_with_warmup_equals_torchtune_after_the_warmup(steps, fraction, warmup):
    def rates(make, *arguments, **options):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
        schedule, used = make(optimizer, *arguments, **options), [optimizer.param_groups[0]["lr"]]
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            used.append(optimizer.param_groups[0]["lr"])
        return used

    torchtunes = rates(get_cosine_schedule_with_warmup, warmup, steps)
    assert rates(cosine_with_warmup, steps, warmup_fraction=fraction, warmup_from_zero=True) == torchtunes
    ours = rates(cosine_with_warmup, steps, warmup_fraction=fraction)
    assert ours[warmup:] == torchtunes[warmup:]
    assert ours[:warmup] == pytest.approx([0.3 * step / warmup for step in range(1, warmup + 1)])


@pytest.mark.parametrize("fraction", [-0.1, 1, "x"])
def test_cosine_with_warmup_rejects_fraction(fraction):
    with pytest.raises(ValueError, match="warmup_fraction"):
        cosine_with_warmup(torch.optim.SGD([torch.zeros(1)], lr=1.0), 10, warmup_fraction=fraction)


def test_methods_page_has_a_row_for_every_method():
    rows = [line.split("`")[1] for line in (ROOT / "docs" / "methods.md").read_text().splitlines() if line[:3] == "| `"]
    assert rows == list(METHODS)
