"""The `finch` command as a user types it."""

import re
import shutil
import subprocess
import sys
import tomllib
from unittest import mock

import pytest
import yaml
from helpers.runs import ROOT, finch

from finch.config.instantiate import config_names, find_config, grid_names
from finch.models.hf_config import FAMILIES
from finch.plan.commands import doctor

NEED_NO_TORCH = """\
import contextlib, sys
from finch.cli.main import main
for arguments in ("--help", "list configs", "list keys", "list methods", "list models", "run key=1", "run --config=no_config"):
    with contextlib.suppress(SystemExit):
        main(arguments.split())
    assert not {"torch", "omegaconf"} & set(sys.modules), arguments
"""


def test_commands_and_missing_configs_need_no_torch():
    subprocess.run([sys.executable, "-c", NEED_NO_TORCH], check=True, capture_output=True)


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


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("data translate --out x.jsonl", "python examples/translate_rows.py"),
        ("gpu-check --quick", "finch doctor --gpu"),
        ("slurm submit my.yaml --nodes 2", "finch run --slurm"),
        ("wise-ft --base a --tuned b --out c", "finch average --base A --tuned B"),
        ("estimate auto --gpus 8", "finch check --exact"),
        ("judge RUN --base-url URL", "finch evaluate --judge URL"),
        ("select-lr out", "finch report --select-lr"),
        ("methods", "finch list methods"),
        ("models gemma", "finch list models"),
        ("keys", "finch list keys"),
        ("configs cp auto x", "finch list --copy NAME"),
    ],
)
def test_an_old_command_names_its_new_one(capsys, old, new):
    code, _, err = finch(capsys, *old.split())
    assert (code, err.count("\n")) == (2, 2)
    assert f"finch: error: finch {old.split()[0]}" in err
    assert new in err


def test_list_is_all_kinds_and_methods_for_comparisons_stand_apart(capsys):
    own, _, apart = finch(capsys, "list", "methods")[1].partition("\n\nfor comparisons, as papers have them:\n")
    assert ["self_replay" in each for each in (own, apart)] == [True, False]
    assert ["dft" in each.split() for each in (own, apart)] == [False, True]
    kinds = re.findall(r"^(\w+):$", finch(capsys, "list")[1], re.MULTILINE)
    assert kinds == ["methods", "models", "configs", "keys"]


@pytest.fixture
def doctor_says(capsys, monkeypatch):
    """(exit code, report) of `finch doctor`; by itself, room on the disk is no problem."""
    monkeypatch.setattr(doctor, "COMFORTABLE_FREE_BYTES", 0)
    return lambda *arguments: finch(capsys, "doctor", *arguments)[:2]


def test_doctor_finds_no_problems_here(doctor_says):
    code, out = doctor_says()
    assert code == 0, out
    assert "no problems found" in out
    assert [
        word for word in ("python ", "torch ", "torchao ", "backends ", "gloo", "free disk") if word not in out
    ] == []
    packages = [line.split()[0] for line in out.partition("optional packages")[0].splitlines() if line]
    assert len(packages) == len(set(packages))  # transformers, which two extras need, is one line


def test_full_doctor_runs_torchs_report_and_pip_check(doctor_says, monkeypatch):
    started = []
    monkeypatch.setattr(doctor.subprocess, "call", lambda command: started.append(command[2:]) or len(started) - 1)
    code, out = doctor_says("--full")
    assert (code, started) == (1, [["torch.utils.collect_env"], ["pip", "check"]])
    assert out.endswith("problem: pip check has failed; its output is above\n")


REQUIRES = [
    "torch>=2.11",
    "tomli>=2; python_version < '3.0'",
    "torchtune<0.8,>=0.6.1; extra == 'torchtune'",
    "torchao<0.16,>=0.13; extra == 'torchtune'",
    "datasets>=4.1; extra == 'torchtune'",
    "nothing-such>=1; extra == 'wandb'",
    "finch-finetune[torchtune]; extra == 'all'",
    "nothing-such>=1; extra == 'dev'",
]


def test_doctor_names_problems_and_their_fixes(doctor_says, monkeypatch):
    versions = {"torchao": "0.17.0", "datasets": None, "wandb": None}
    installed = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, installed(name)))
    extras = mock.Mock(get_all=lambda _: ["torchtune", "wandb", "all", "dev"])
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: REQUIRES)
    monkeypatch.setattr(doctor.metadata, "metadata", lambda _: extras)
    monkeypatch.setattr(doctor, "COMFORTABLE_FREE_BYTES", 2e9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 10**9))
    code, out = doctor_says()
    assert code == 1
    assert "problem: torchao 0.17.0 is outside <0.16,>=0.13: pip install 'torchao<0.16,>=0.13'" in out
    assert "problem: datasets is missing: pip install 'datasets>=4.1'" in out
    assert "problem: 1 GB are free here" in out
    assert out.count("problem: ") == 3
    assert re.search(r"^torchtune +installed +the recipes, and", out, re.MULTILINE)
    assert re.search(r"^wandb +pip install .*\[wandb\]' +metric_logger=wandb$", out, re.MULTILINE)
    assert "tomli" not in out
    versions["torchtune"] = None  # without it the packages of its extra are of no concern
    _, out = doctor_says()
    assert out.count("problem: ") == 1
    assert "torchao" not in out
    assert re.search(r"^torchtune +pip install .*\[torchtune\]' +the recipes, and", out, re.MULTILINE)


def test_doctor_says_what_every_extra_is_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(doctor.PURPOSES) == sorted(set(extras) - {doctor.CONTRIBUTOR_EXTRA})


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
