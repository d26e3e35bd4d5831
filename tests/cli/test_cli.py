"""The `finch` command as a user types it."""

import shutil
import subprocess
import sys

import pytest
import yaml
from helpers.runs import finch

from finch.cli import doctor
from finch.config.registry import config_names, find_config


def test_help_does_not_wait_for_torch():
    code = "import sys; from finch.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\nassert not {'torch', 'omegaconf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize("arguments", [("configs",), ("configs", "list")])
def test_configs_are_listed_with_a_line_each(capsys, arguments):
    code, out, _ = finch(capsys, *arguments)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(config_names())
    assert all(len(line.split(None, 1)[1]) > 20 for line in out.splitlines())


def test_show_resolves_references_and_fills_in_defaults(capsys):
    code, out, _ = finch(capsys, "configs", "show", "qwen3/4B_finch", "model_dir=/models/x", "epochs=2")
    shown = yaml.safe_load(out)
    assert code == 0
    assert shown["tokenizer"]["path"] == "/models/x/tokenizer.json"
    assert (shown["epochs"], shown["drop_last"]) == (2, False)
    code, out, _ = finch(
        capsys,
        "configs",
        "show",
        "qwen3/4B_finch",
        "model=finch.models.qwen3.qwen3_4b_base",
        "lr_scheduler=null",
        "~seed",
    )
    assert yaml.safe_load(out)["model"] == {"_component_": "finch.models.qwen3.qwen3_4b_base"}
    assert (yaml.safe_load(out)["lr_scheduler"], yaml.safe_load(out)["seed"]) == (None, 0)
    code, out, _ = finch(capsys, "configs", "show", "stories260k/tofu_finch")
    assert yaml.safe_load(out)["checkpointer"]["checkpoint_dir"] == "<data_root>/stories260k"


def test_show_refuses_what_a_run_refuses(capsys):
    code, _, err = finch(capsys, "configs", "show", "stories260k/tofu_finch", "optimizer.lrr=3")
    assert code == 1
    assert "did you mean optimizer.lr?" in err
    code, out, _ = finch(capsys, "configs", "show", "stories260k/tofu_finch", "epochs=9")
    assert (code, yaml.safe_load(out)["epochs"]) == (0, 9)


def test_cp_copies_and_never_overwrites(capsys, tmp_path):
    target = tmp_path / "mine" / "config.yaml"
    code, out, _ = finch(capsys, "configs", "cp", "llama3/8B_sft", str(target))
    assert code == 0
    assert f"--config {target}" in out
    assert target.read_text() == find_config("llama3/8B_sft").read_text()
    code, _, err = finch(capsys, "configs", "cp", "llama3/8B_sft", str(target))
    assert code == 1
    assert f"{target} exists; give another name" in err


@pytest.mark.parametrize("action", [("show",), ("cp", "x.yaml")])
def test_a_wrong_name_is_answered_with_the_nearest(capsys, tmp_path, monkeypatch, action):
    monkeypatch.chdir(tmp_path)
    code, _, err = finch(capsys, "configs", action[0], "qwen3/4B_fnch", *action[1:])
    assert code == 1
    assert "did you mean qwen3/4B_finch?" in err
    assert not list(tmp_path.iterdir())


def test_the_doctor_finds_this_environment_well(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "COMFORTABLE_FREE_BYTES", 0)
    code, out, _ = finch(capsys, "doctor")
    assert code == 0, out
    assert "all of this fits together" in out
    for word in ("python ", "torch ", "torchao ", "backends ", "gloo", "free disk"):
        assert word in out


def test_the_doctor_names_what_does_not_fit_and_the_command_that_mends_it(capsys, monkeypatch):
    versions = {"torchao": "0.17.0", "datasets": None}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions.get(name, real(name)))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 10**9))
    code, out, _ = finch(capsys, "doctor")
    assert code == 1
    assert "problem: torchao 0.17.0 is outside <0.16,>=0.13: pip install 'torchao<0.16,>=0.13'" in out
    assert "problem: datasets is missing: pip install 'datasets>=4.1'" in out
    assert "problem: 1 GB are free here" in out
