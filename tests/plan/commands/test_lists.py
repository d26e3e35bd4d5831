"""`finch list`: what it lists, shows and copies."""

import re

import pytest
import yaml
from helpers.runs import ROOT, finch

from finch.config.instantiate import config_names, find_config, grid_names
from finch.config.key_search import ADAMW, shown_keys
from finch.config.schema import COMPONENTS, LoraFinetuneKeys, keys
from finch.models.hf_config import FAMILIES


def test_configs_lists_names_with_headers(capsys):
    code, out, _ = finch(capsys, "list", "configs")
    assert code == 0
    listed = dict(line.split(None, 1) for line in out.splitlines())
    assert list(listed) == [*config_names(), *grid_names()]
    assert listed["qwen3/4B_finch"] == "FINCH on Qwen3-4B: the paper's knowledge task, TOFU."


def show(capsys, name, *overrides):
    code, out, err = finch(capsys, "list", "--show", name, *overrides)
    assert code == 0, err
    return yaml.safe_load(out)


def test_configs_show_resolves_and_fills_in_defaults(capsys):
    cfg = show(capsys, "qwen3/4B_finch", "model_dir=/models/x", "epochs=2")
    assert (cfg["tokenizer"]["path"], cfg["epochs"], cfg["drop_last"]) == ("/models/x/tokenizer.json", 2, False)
    builder = "finch.models.qwen3.qwen3_4b_base"
    cfg = show(capsys, "qwen3/4B_finch", f"model={builder}", "lr_scheduler=null", "~seed")
    assert (cfg["model"], cfg["lr_scheduler"], cfg["seed"]) == ({"_component_": builder}, None, 0)
    for overrides in ((), ("epochs=9",)):
        cfg = show(capsys, "stories260k/tofu_finch", *overrides)
        assert cfg["checkpointer"]["checkpoint_dir"] == "<data_root>/stories260k"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--show", "stories260k/tofu_finch", "optimizer.lrr=3"), "did you mean optimizer.lr?"),
        (("--copy", "qwen3/4B_fnch", "x.yaml"), "did you mean qwen3/4B_finch?"),
    ],
)
def test_configs_rejects(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = finch(capsys, "list", *arguments)
    assert (code, message in err, list(tmp_path.iterdir())) == (1, True, []), err


@pytest.mark.parametrize("name", ["sweeps/quickstart", "sweeps/qwen3_4B_knowledge"])
def test_configs_show_and_cp_know_grids(capsys, tmp_path, name):
    assert show(capsys, name) == yaml.safe_load(grid_names()[name].read_text())
    code, _, err = finch(capsys, "list", "--show", name, "epochs=2")
    assert (code, f"finch sweep {name} --dry-run epochs=2" in err) == (2, True)
    code, out, _ = finch(capsys, "list", "--copy", name, str(tmp_path / "grid.yaml"))
    assert (code, f"finch sweep {tmp_path}/grid.yaml" in out) == (0, True)
    assert (
        (tmp_path / "grid.yaml")
        .read_text()
        .startswith(f"# yaml-language-server: $schema={ROOT / 'finch' / 'config' / 'grid.schema.json'}\n")
    )


def test_configs_cp_never_overwrites(capsys, tmp_path):
    target = tmp_path / "new" / "config.yaml"
    code, out, _ = finch(capsys, "list", "--copy", "llama3/8B_sft", str(target))
    assert code == 0
    assert f"start it with: finch run {target}" in out
    schema, _, copied = target.read_text().partition("\n")
    assert schema == f"# yaml-language-server: $schema={ROOT / 'finch' / 'config' / 'finch.schema.json'}"
    assert copied == find_config("llama3/8B_sft").read_text().partition("\n")[2]
    code, _, err = finch(capsys, "list", "--copy", "llama3/8B_sft", str(target))
    assert code == 1
    assert f"{target} exists; give another name" in err


def test_list_is_all_kinds_and_methods_for_comparisons_stand_apart(capsys):
    own, _, apart = finch(capsys, "list", "methods")[1].partition("\n\nfor comparisons, as papers have them:\n")
    assert ["self_replay" in each for each in (own, apart)] == [True, False]
    assert ["dft" in each.split() for each in (own, apart)] == [False, True]
    kinds = re.findall(r"^(\w+):$", finch(capsys, "list")[1], re.MULTILINE)
    assert kinds == ["methods", "models", "configs", "keys"]


def test_keys_lists_all_keys(capsys):
    out = finch(capsys, "list", "keys")[1]
    listed = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    arguments = [f"{model.key}.{name}" for model in COMPONENTS for name in keys(model)]
    assert sorted(listed) == sorted([*shown_keys(LoraFinetuneKeys), *ADAMW, *arguments])
    assert "[True, False, auto or PATH; default: False]" in out


@pytest.mark.parametrize(
    ("word", "listed"),
    [
        ("N_Minutes", "checkpoint.every_n_minutes"),
        ("the paper clips", "clip_grad_norm"),
        ("eta_max", "lr_scheduler.eta_max"),
        ("optimizer.lr", "optimizer.lr lr_scheduler.eta_base"),
        ("lora_rank", "model.lora_rank model.lora_alpha"),
        ("objectives.TALR", "loss.tau loss.w_min"),
    ],
)
def test_keys_searches_names_and_descriptions(capsys, word, listed):
    code, out, _ = finch(capsys, "list", "keys", word)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if line.startswith("  ")] == listed.split()


@pytest.mark.parametrize(
    "word",
    ["epocs, did you mean epochs", "eta_mx, did you mean lr_scheduler.eta_max", "learning_rate; use optimizer.lr"],
)
def test_keys_says_what_to_search_for(capsys, word):
    code, _, err = finch(capsys, "list", "keys", re.split("[,;]", word)[0])
    assert (code, f"no key contains {word}" in err) == (1, True), err


def test_models_lists_every_family(capsys):
    code, out, _ = finch(capsys, "list", "models")
    assert code == 0
    for model_type, family in FAMILIES.items():
        assert re.search(rf"^{model_type} +{re.escape(family.name)}$", out, re.MULTILINE)
        assert [word for word in (*family.examples, *family.builders) if word not in out] == []
    assert out.count("method=lora") == sum(family.has_lora for family in FAMILIES.values())


@pytest.mark.parametrize(
    ("command", "word", "names"),
    [
        ("methods", "REPLAY", ["preserve", "self_replay"]),
        ("models", "gemma-2b", ["gemma"]),
        ("configs", "qwen3/4B_S", ["qwen3/4B_sft"]),
    ],
)
def test_methods_and_models_are_searched(capsys, command, word, names):
    code, out, _ = finch(capsys, "list", command, word)
    listed = [line.split()[0] for line in out.partition("\n\n")[0].splitlines() if line and line[0] != " "]
    assert (code, listed) == (0, names)
    code, _, err = finch(capsys, "list", command, f"{names[0]}x")
    assert code == 1
    assert f"no {command[:-1]} contains {names[0]}x, did you mean {names[0]}?" in err
