"""The wheel: what it holds, and what it does where only torch is installed, beside the newest peft, and with the torchtune extra.

A fresh environment is a venv that has torch and what torch itself requires, linked from the test environment, and nothing else of it: a
CUDA build of torch is several GB. What pip resolves there is therefore everything but torch.
"""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from helpers.runs import ROOT, environment
from packaging.requirements import Requirement

from finch.base.extras import PACKAGES

STEP = """
import sys, torch
from finch import FinchLR, ReplayLR
from finch.objectives import DFT
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.AdamW([parameter], lr=2e-5)
schedule = FinchLR(optimizer, eta_max=5e-5, init=4.0)
for loss in (4.0, 1.0):
    parameter.grad = torch.ones(3)
    assert schedule.step(torch.tensor(loss))
    optimizer.step()
assert abs(schedule.get_last_lr()[0] - 2e-5 / 3.7**0.5) < 1e-10
assert DFT().weights(torch.zeros(1, 2), {}).tolist() == [[1.0, 1.0]]
assert 'torchtune' not in sys.modules
"""
CALLBACK = """
import sys, peft, torch, torchao, transformers
from finch.integrations.transformers import FinchCallback
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
)
model = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=['q_proj']))
options = {'learning_rate': 2e-3, 'lr_scheduler_type': 'constant', 'logging_steps': 1, 'report_to': 'none', 'use_cpu': True}
args = transformers.TrainingArguments('out', max_steps=3, save_strategy='no', **options)
rows = [{'input_ids': list(range(8)), 'labels': list(range(8))}] * 24
finch = FinchCallback(eta_max=5e-3, init='dataset')
transformers.Trainer(model, args, train_dataset=rows, callbacks=[finch]).train()
assert abs(finch.schedule.get_last_lr()[0] - 2e-3 / finch.schedule.ema_loss**0.5) < 1e-8
assert 'torchtune' not in sys.modules
"""
NEEDS_TORCHTUNE = "needs the torchtune extra: pip install '{}[torchtune]'"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory):
    """A folder with links to torch and to what torch requires."""
    folder = tmp_path_factory.mktemp("torch")
    waiting, seen = [Requirement("torch")], set()
    while waiting:
        required = waiting.pop()
        if str(required) in seen:
            continue
        seen.add(str(required))
        distribution = metadata.distribution(required.name)
        for top in {Path(file).parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(distribution.locate_file(top))
        for other in map(Requirement, distribution.requires or []):
            if other.marker is None or any(other.marker.evaluate({"extra": extra}) for extra in ("", *required.extras)):
                waiting.append(other)
    return folder


def run(command, folder, *, path="", code=0):
    """stdout and stderr of a command that runs away from the checkout, with ``path`` as its PYTHONPATH."""
    options = {"capture_output": True, "text": True, "check": False, "env": environment(PYTHONPATH=str(path))}
    done = subprocess.run(command, cwd=folder, **options)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def install_wheel(python, wheel, folder):
    """The folder with nothing but the wheel's files."""
    run([python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", folder / "site", wheel], folder)
    return folder / "site"


@pytest.fixture
def venv(tmp_path, torch_alone):
    """A function that runs a program of a fresh environment."""
    folder = tmp_path / "venv"
    run([sys.executable, "-m", "venv", folder], tmp_path)
    (site,) = folder.glob("lib/python*/site-packages")
    for path in site.glob("setuptools*"):  # Python 3.11's own, older than torch's; it would hide the linked one
        shutil.rmtree(path)
    (site / "torch.pth").write_text(f"{torch_alone}\n")
    return lambda program, *arguments, code=0: run([folder / "bin" / program, *arguments], folder, code=code)


def test_require_extras_names_packages_of_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, packages in PACKAGES.items():
        assert set(packages) <= {Requirement(text).name.replace("-", "_") for text in extras[extra]}  # as modules


@pytest.mark.slow
def test_wheel_holds_recipes_and_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"finch/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs <= names
    assert {f"finch/slurm_scripts/{path.name}" for path in (ROOT / "slurm").iterdir()} <= names
    assert {f"finch/data/skills/{path.name}" for path in (ROOT / "finch" / "data" / "skills").glob("*.jsonl")} <= names
    recipes = {path.name for path in (ROOT / "recipes").glob("*.py")}
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"finch", *recipes}


@pytest.mark.slow
def test_core_needs_torch_alone(wheel, venv):
    """Without an index: pip finds all that the wheel requires, which is torch."""
    venv("pip", "install", "-q", "--no-index", str(wheel))
    venv("python", "-c", STEP)
    venv("python", "-c", "import omegaconf", code=1)
    assert "finch " in venv("finch", "--version")
    assert "talr " in venv("finch", "list", "methods")
    assert "qwen3/4B_finch " in venv("finch", "list", "configs")
    assert "torchtune    not installed" in venv("finch", "doctor")
    for command in (
        ("python", "-m", "finch_full_finetune", "--config", "qwen3/4B_finch"),
        ("python", "-m", "finch_lora_finetune", "--config", "qwen3/4B_finch"),
        ("finch", "list", "--show", "qwen3/4B_finch"),
        ("finch", "list", "keys"),
        ("finch", "run", "--slurm", "qwen3/4B_finch", "--dry-run"),
        ("finch", "average", "--base", "base", "--tuned", "tuned", "--out", "out"),
    ):
        (line,) = venv(*command, code=1).strip().splitlines()
        assert line.startswith("finch: error: ")
        assert line.endswith(NEEDS_TORCHTUNE.format(wheel))


@pytest.mark.slow
def test_core_installs_beside_newest_peft_and_torchao(wheel, venv, tmp_path):
    """The newest that the index has and that fit together; skipped where it cannot be reached."""
    pip = tmp_path / "venv" / "bin" / "pip"
    probe = [pip, "download", "-q", "--retries=0", "--no-deps", "--dest", tmp_path, "iniconfig"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        pytest.skip("pip cannot reach the package index")
    venv("pip", "install", "-q", "--no-compile", f"{wheel}[hf]", "peft", "torchao")
    venv("pip", "check")
    venv("python", "-c", CALLBACK)


@pytest.mark.slow
def test_core_runs_on_python_3_13(wheel, tmp_path):
    """Any Python 3.13 that has torch, whatever else is installed there: FINCH_TEST_PYTHON, or python3.13 on the PATH."""
    python = os.environ.get("FINCH_TEST_PYTHON", shutil.which("python3.13"))
    check = "import sys, importlib.util as u; assert sys.version_info[:2] == (3, 13) and u.find_spec('torch')"
    probe = [str(python), "-c", check]
    if python is None or subprocess.run(probe, capture_output=True, check=False, cwd=tmp_path).returncode != 0:
        pytest.skip("no Python 3.13 with torch; name one in FINCH_TEST_PYTHON")
    run([python, "-W", "ignore", "-c", STEP], tmp_path, path=install_wheel(python, wheel, tmp_path))


@pytest.mark.slow
def test_wheel_finds_recipe_and_configs_away_from_checkout(wheel, tmp_path):
    """With all packages of the test environment, the torchtune extra's among them; only the wheel is installed."""
    site = install_wheel(sys.executable, wheel, tmp_path)

    def python(*arguments, code=0):
        return run([sys.executable, *arguments], tmp_path, path=site, code=code)

    origin = python("-c", "import finch, finch_full_finetune; print(finch.__file__, finch_full_finetune.__file__)")
    assert origin.count(str(site)) == 2, origin
    assert "qwen3/4B_finch  " in python("-m", "finch.cli", "list", "configs")
    submit = ("run", "--slurm", "qwen3/4B_finch", "--dry-run", f"output_dir={tmp_path / 'run'}")
    assert f" output_dir={tmp_path / 'run'}\n" in python("-m", "finch.cli", *submit)
    # The name resolves, the config passes, its components are found: the first error is the missing model.
    tune = ("-m", "torchtune._cli.tune", "run", "finch_full_finetune", "--config", "qwen3/4B_finch")
    output = python(*tune, "device=cpu", f"model_dir={tmp_path / 'absent'}", code=1)
    error = f"finch: error: checkpointer.checkpoint_dir={tmp_path / 'absent'} is not a folder; correct the path"
    assert error in output
