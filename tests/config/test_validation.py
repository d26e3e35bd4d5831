"""Checks of keys and values, without a run."""

import pytest
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.config.resolved import redacted
from finch.config.schema import FULL_FINETUNE, REQUIRED, UNSUPPORTED_KEYS
from finch.config.validation import check
from finch.errors import UserError


def checked(**changes):
    return check(OmegaConf.create({**MINIMAL, **changes}), FULL_FINETUNE)


def test_check_fills_in_defaults():
    cfg = checked()
    assert set(cfg) == set(FULL_FINETUNE)
    assert all(cfg[key] == option.default for key, option in FULL_FINETUNE.items() if option.default is not REQUIRED)


def test_check_accepts_user_keys_that_others_refer_to():
    assert checked(data_root="/data", output_dir="${data_root}/out").output_dir == "/data/out"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ocean": "/data"}, r"^unknown key ocean=/data; see `finch keys`"),
        ({"epoch": 3}, r"^unknown key epoch=3, did you mean epochs\?"),
        ({"hf_token": "hf_do_not_show"}, r"^unknown key hf_token=\*\*\*;"),
        ({"epochs": None}, r"^epochs has no value: passes .*; leave the key out for 1"),
        ({"dataset": None}, r"^dataset is missing: training rows"),
        ({"model": 7}, r"^model=7 must be a block with a _component_: builds"),
        ({"dataset": {"source": "json"}}, r"^dataset has no _component_: "),
        ({"batch_size": "x"}, r"^batch_size=x must be int >= 1: samples"),
        ({"clip_grad_norm": -1}, r"^clip_grad_norm=-1 must be number > 0 or null: .*the paper clips to 1\.0"),
        ({"dtype": "fp8"}, r"^dtype=fp8 must be fp32, bf16, .* or fp64: "),
        ({"dtype": "fp16"}, r"^dtype=fp16 is not trained in full: .* use bf16, bf16_mixed or fp32"),
        (
            {"checkpoint": {"every_n_step": 5}},
            r"^unknown key checkpoint\.every_n_step=5, .* checkpoint\.every_n_steps\?",
        ),
        ({"checkpoint": {"often": 5}}, r"^unknown key checkpoint\.often=5; checkpoint accepts every_n_steps, "),
        ({"checkpoint": {"every_n_steps": "five"}}, r"^checkpoint\.every_n_steps=five must be int >= 1 or null: "),
        ({"checkpoint": {"every_n_steps": 0}}, r"^checkpoint\.every_n_steps=0 must be int >= 1 or null: "),
        ({"checkpoint": {"async": 1}}, r"^checkpoint\.async=1 must be True or False: "),
        ({"checkpoint": "often"}, r"^checkpoint=often must be a block with some of every_n_steps, "),
    ],
)
def test_check_rejects(changes, message):
    with pytest.raises(UserError, match=message):
        checked(**changes)


def test_check_fills_in_a_block_without_a_component():
    expected = {"every_n_steps": None, "every_n_minutes": 0.5, "keep_last": 1, "async": True}
    assert checked(checkpoint={"every_n_minutes": 0.5}).checkpoint == expected


@pytest.mark.parametrize("key", UNSUPPORTED_KEYS)
def test_check_drops_torchtune_keys_without_effect(key):
    no_op_value = UNSUPPORTED_KEYS[key].no_op_value
    assert key not in checked(**{key: no_op_value})
    other = {None: 7, True: False, False: True}.get(no_op_value, "other")
    with pytest.raises(UserError, match=rf"^{key}={other}: .*; "):
        checked(**{key: other})


def test_check_applies_torchtune_aliases():
    cfg = checked(dataset_val=MINIMAL["dataset"], run_val_every_n_steps=5)
    assert (cfg.dataset_validation, cfg.validate_every_n_steps) == (MINIMAL["dataset"], 5)


def test_redacted_masks_secrets():
    dataset = {"hf_token": "s3cret-b", "api_key": "s3cret-c", "path": "at:${token}@x"}
    rows = [{"password": "s3cret-d"}]
    cfg = {"token": "s3cret-a", "dataset": dataset, "rows": rows, "tokenizer": "e", "max_tokens": "f"}
    text = OmegaConf.to_yaml(redacted(OmegaConf.create(cfg)))
    assert "s3cret" not in text
    assert all(line in text for line in ("path: at:***@x", "tokenizer: e", "max_tokens: f"))
