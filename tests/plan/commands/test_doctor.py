"""What `finch doctor` says of an environment's packages."""

from __future__ import annotations

import os
import re
import shutil
import tomllib
from importlib import metadata
from unittest import mock

import pytest
import torch
from helpers.runs import ROOT, finch
from packaging.requirements import Requirement

from finch.plan.commands import doctor


def installed_by(text: str, found: set[tuple[str, str]]) -> None:
    """Adds what pip installs for a requirement, by the metadata of what is installed here."""
    requirement = Requirement(text)
    for extra in ("", *requirement.extras):
        if (requirement.name, extra) in found:
            continue
        found.add((requirement.name, extra))
        try:
            needed = metadata.requires(requirement.name) or []
        except metadata.PackageNotFoundError:
            continue
        for each in map(Requirement, needed):
            if each.marker is None or each.marker.evaluate({"extra": extra}):
                installed_by(str(each), found)


@pytest.mark.parametrize("extras", ["", "torchtune", "torchtune,evaluate", "torchtune,evaluate,report", "hf", "openai"])
def test_an_environment_of_an_install_line_has_no_problem(monkeypatch, capsys, extras):
    found: set[tuple[str, str]] = set()
    installed_by(f"finch-finetune[{extras}]" if extras else "finch-finetune", found)
    names = {name.lower().replace("_", "-") for name, _ in found}
    version = doctor._version
    monkeypatch.setattr(
        doctor, "_version", lambda name: version(name) if name.lower().replace("_", "-") in names else None
    )
    lines: list[str] = []
    assert list(doctor._package_problems(lines)) == []
    used = {line.split()[0] for line in lines if " installed " in line}
    assert used >= set(filter(None, extras.split(",")))
    names.discard("torchao")
    assert bool(list(doctor._package_problems([]))) == ("torchtune" in extras)


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
    assert "note: a 4B model needs" in out  # the user's may be smaller
    assert out.count("problem: ") == 2
    assert re.search(r"^torchtune +installed +the recipes, and", out, re.MULTILINE)
    assert re.search(r"^wandb +pip install .*\[wandb\]' +metric_logger=wandb$", out, re.MULTILINE)
    assert "tomli" not in out
    versions["torchtune"] = None  # without it the packages of its extra are of no concern
    code, out = doctor_says()
    assert code == 0
    assert "torchao" not in out
    assert re.search(r"^torchtune +pip install .*\[torchtune\]' +the recipes, and", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("driver", "visible", "cuda", "problem"),
    [
        ("echo 'NVIDIA-SMI has failed because it could not communicate with the driver'; exit 9", None, "12.8", None),
        ("echo 'No devices found.'", None, "12.8", None),
        ("echo 'GPU 0: Tesla T4'", None, None, "there is an NVIDIA driver, but torch (a CPU build) sees no GPU: pip"),
        ("echo 'GPU 0: Tesla T4'", "", "12.8", "CUDA_VISIBLE_DEVICES= hides the GPUs that `nvidia-smi -L` lists"),
        ("echo 'GPU 0: Tesla T4'", "0", None, "there is an NVIDIA driver, but torch (a CPU build) sees no GPU: pip"),
    ],
)
def test_doctor_names_a_driver_that_lists_gpus(driver, visible, cuda, problem, doctor_says, tmp_path, monkeypatch):
    file = tmp_path / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{driver}\n")
    file.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out = doctor_says()
    assert (code, out.count("problem: ")) == (int(problem is not None),) * 2
    assert f"problem: {problem}" in out or problem is None


def test_doctor_says_which_gpu_has_bf16(doctor_says, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = [mock.Mock(major=major, total_memory=2**34) for major in (9, 7)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    _, out = doctor_says()
    assert re.findall(r"^cuda:(\d).* GiB, (.*)$", out, re.MULTILINE) == [("0", "bf16"), ("1", "no bf16")]


def test_doctor_says_what_every_extra_is_for():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert sorted(doctor.PURPOSES) == sorted(set(extras) - {doctor.CONTRIBUTOR_EXTRA})
