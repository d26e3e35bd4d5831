"""What an installed wheel must hold: the recipe as a top-level module, the configs beside the package."""

import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT


@pytest.mark.slow
def test_the_wheel_holds_recipe_and_configs(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    configs = {f"finch/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert configs <= names
    assert {path.name for path in (ROOT / "recipes").glob("*.py")} <= names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"finch", "finch_full_finetune.py"}
