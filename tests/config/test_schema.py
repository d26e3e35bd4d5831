"""The keys: types, choices and defaults; and the texts made from them."""

import runpy
import subprocess
import sys

import pytest
from helpers.runs import ROOT, finch

from finch.config.key_help import format_default, format_keys, key_options
from finch.config.schema import FULL_FINETUNE, LORA_FINETUNE, REQUIRED
from finch.distributed.precision import PRECISIONS
from finch.errors import UserError

OPTIONS = dict(key_options(LORA_FINETUNE))


@pytest.mark.parametrize("key", OPTIONS)
def test_option_accepts_its_default(key):
    option = OPTIONS[key]
    if option.default is None:
        assert option.is_nullable
    elif option.default is not REQUIRED:
        assert option.accepts(option.default)


def test_options_are_used():
    files = [path for folder in ("finch", "recipes") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text() for path in files if path.parent.name != "config")
    for key in LORA_FINETUNE:
        assert f".{key}" in code or f'"{key}"' in code, key


def test_dtype_choices_are_the_implemented_ones():
    assert set(FULL_FINETUNE["dtype"].choices) == set(PRECISIONS)
    assert set(FULL_FINETUNE["export_dtype"].choices) <= set(PRECISIONS)


@pytest.mark.parametrize(
    ("key", "expected", "accepted", "rejected"),
    [
        ("batch_size", "int >= 1", [1, 8], [0, 1.0, True, "1"]),
        ("distributed_timeout", "number >= 1", [1, 2.5], [0, False, "x"]),
        ("shuffle", "True or False", [True, False], [1, "True"]),
        ("seed", "int >= 0 or null", [0, 7], [-1]),
        ("clip_grad_norm", "number > 0 or null", [1, 0.5, "1.0", float("inf")], [0, -1, "x", True, float("nan")]),
        ("ac_mode", "full, selective or null", ["full", "selective"], ["op", 1]),
        ("ac_option", "op, int >= 1 or null", ["op", 1, "2"], [0, "full", True]),
        ("device", "auto, cpu, cuda or cuda:N", ["auto", "cpu", "cuda", "cuda:1"], ["tpu", "cuda:x", "cpu:0", 0]),
        ("data_parallel_shard_dim", "-1 or int >= 1", [-1, 1, 8], [0, -2, "all"]),
        ("resume_from_checkpoint", "True, False, auto or PATH", [True, False, "auto", "run/step_5"], [1]),
        ("cudnn_deterministic_mode", "default, warn, error, 0, 1, 2 or null", ["warn", 0, 2], [True, 3, "on"]),
        ("log_level", "DEBUG, INFO, WARNING, ERROR or CRITICAL", ["INFO", "debug", "WARN"], ["LOUD", 10]),
        ("export_dtype", "fp32, bf16, fp64 or null", ["fp32", "bf16", "fp64"], ["bf16_mixed", "fp16"]),
        ("on_nonfinite", "raise, skip, rollback or null", ["raise", "skip", "rollback"], ["ignore"]),
        ("model", "component", [{}], [[], 7, "x"]),
        ("dataset", "component or list", [{}, []], [7, "x"]),
        ("output_dir", "text", ["x"], [7]),
    ],
)
def test_option_values(key, expected, accepted, rejected):
    option = FULL_FINETUNE[key]
    assert option.expected == expected
    assert [value for value in accepted if not option.accepts(value)] == []
    assert [value for value in rejected if option.accepts(value)] == []


def test_keys_lists_all_keys_without_importing_torch():
    code = "import sys; from finch.cli.main import main; main(['keys']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert sorted(words[0] for words in lines) == sorted(OPTIONS)
    assert "[raise, skip, rollback or null; default: null]" in done.stdout


def test_keys_searches_names_and_descriptions(capsys):
    code, out, _ = finch(capsys, "keys", "Every_N")
    assert code == 0
    keys = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert keys[:3] == ["validate_every_n_steps", "probes.NAME.every_n_steps", "probes_every_n_steps"]
    assert keys[3:] == ["checkpoint.every_n_steps", "checkpoint.every_n_minutes", "log_every_n_steps"]
    assert "clip_grad_norm" in format_keys("the paper clips")
    with pytest.raises(UserError, match="no key contains epocs, did you mean epochs"):
        format_keys("epocs")


def test_recipe_page_lists_every_key():
    table = runpy.run_path(str(ROOT / "docs" / "keys.py"))["table"]()
    assert table.strip() in (ROOT / "docs" / "recipe.md").read_text()
    assert format_default(OPTIONS["loss"]) == "torch.nn.CrossEntropyLoss"
