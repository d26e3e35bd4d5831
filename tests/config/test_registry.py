import subprocess
import sys

import pytest

from finch.config.registry import config_names, did_you_mean, find_config
from finch.errors import UserError


def test_configs_resolve_by_name_and_by_path(tmp_path):
    names = config_names()
    assert {"stories260k/tofu_finch", "stories260k/tofu_sft"} <= set(names)
    assert (
        find_config("stories260k/tofu_finch")
        == names["stories260k/tofu_finch"]
        == find_config("stories260k/tofu_finch.yaml")
    )
    file = tmp_path / "mine.yaml"
    file.write_text("a: 1")
    assert find_config(str(file)) == file


def test_a_wrong_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match=r"--config stories260k/tofu_finhc .*did you mean stories260k/tofu_finch\?"):
        find_config("stories260k/tofu_finhc")
    with pytest.raises(UserError, match=r"finch has .*stories260k/tofu_sft"):
        find_config("/nowhere/at/all/x.yaml")


def test_did_you_mean():
    assert did_you_mean("ocean", ["epochs", "seed"]) == ""
    assert did_you_mean("epoch", ["epochs", "seed"]) == ", did you mean epochs?"
    assert did_you_mean("Adamw", ["Adam", "AdamW"], prefix="torch.optim.") == ", did you mean torch.optim.AdamW?"


def test_the_command_lists_configs_without_importing_torch():
    code = "import sys; from finch.cli.main import main; main(['configs']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "stories260k/tofu_finch  " in done.stdout
    assert all(len(line.split(None, 1)[1]) > 20 for line in done.stdout.splitlines())
