"""What an installed wheel must hold: the recipe as a top-level module, the configs beside the package."""

import subprocess
import sys
import zipfile

import pytest
from helpers.runs import ROOT, environment


@pytest.mark.slow
def test_the_wheel_holds_recipe_and_configs(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"finch/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs <= names
    assert {f"finch/slurm_scripts/{path.name}" for path in (ROOT / "slurm").iterdir()} <= names
    assert {path.name for path in (ROOT / "recipes").glob("*.py")} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        "finch",
        "finch_full_finetune.py",
        "finch_lora_finetune.py",
    }


@pytest.mark.slow
def test_an_installed_wheel_finds_recipe_and_configs_away_from_the_checkout(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)

    def run(*command):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=elsewhere,
            capture_output=True,
            text=True,
            check=False,
            env=environment(PYTHONPATH=str(site)),
        )
        return done.stdout + done.stderr

    where = run("-c", "import finch, finch_full_finetune; print(finch.__file__, finch_full_finetune.__file__)")
    assert where.count(str(site)) == 2, where
    assert "qwen3/4B_finch  " in run("-m", "finch.cli", "configs")
    submit = ("slurm", "submit", "qwen3/4B_finch", "--dry-run", f"output_dir={tmp_path / 'run'}")
    assert f"\n  output_dir={tmp_path / 'run'}\n" in run("-m", "finch.cli", *submit)
    # The name resolves, the config passes, its components are found: what is missing is the model, and that is said.
    tune = ("-m", "torchtune._cli.tune", "run", "finch_full_finetune", "--config", "qwen3/4B_finch")
    told = run(*tune, "device=cpu", f"model_dir={tmp_path / 'absent'}")
    assert (
        f"finch: error: checkpointer.checkpoint_dir={tmp_path / 'absent'} is not a folder; download the model" in told
    )
