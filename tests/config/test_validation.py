"""Checks of keys, values, components and the weights of datasets, without a run."""

import re

import pytest
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.config.parser import merge
from finch.config.resolved import format_override, redacted
from finch.config.schema import REQUIRED, UNSUPPORTED_KEYS, FullFinetuneKeys, keys
from finch.config.validation import check, dataset_weights, without_weight


def checked(**changes):
    return check(OmegaConf.create({**MINIMAL, **changes}), FullFinetuneKeys)


def test_check_fills_in_defaults():
    cfg = checked()
    defaults = {name: key.default for name, key in keys(FullFinetuneKeys).items() if "." not in name}
    assert set(cfg) == set(defaults)
    assert all(cfg[name] == default for name, default in defaults.items() if default is not REQUIRED)


def test_check_accepts_user_keys_that_others_refer_to():
    assert checked(data_root="/data", output_dir="${data_root}/out").output_dir == "/data/out"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ocean": "/data"}, r"^unknown key ocean=/data; see `finch list keys`"),
        ({"epoch": 3}, r"^unknown key epoch=3, did you mean epochs\?"),
        ({"hf_token": "hf_do_not_show"}, r"^unknown key hf_token=\*\*\*;"),
        ({"unused": "???"}, r"^unknown key unused=\?\?\?"),
        (
            {"tokenizer": {"_component_": "torchtune.models.llama2.llama2_tokenizer", "path": "???"}},
            r"^tokenizer\.path is not set",
        ),
        ({"output_dir": "a\0b"}, r"^output_dir=a\\x00b: text has no NUL character"),
        ({"output_dir": "out\n"}, r"^output_dir=out\\n: a path has no control character"),
        (
            {"output_dir": "out/" + "x" * 256},
            r"^output_dir=out/x+[.]{3}x+: a file's or folder's name has at most 255 bytes",
        ),
        ({"epochs": 1e308}, "^epochs=1e[+]308 must be int >= 1"),
        ({"dataset": ["json"]}, r"^dataset=\[\.\.\.\] "),
        ({"epochs": None}, r"^epochs has no value: passes .*; leave the key out for 1"),
        ({"dataset": None}, r"^dataset is missing: training rows"),
        ({"model": 7}, r"^model=7 must be a block with a _component_: builds"),
        ({"dataset": {"source": "json"}}, r"^dataset has no _component_: "),
        ({"batch_size": "x"}, r"^batch_size=x must be int >= 1: samples"),
        ({"dtype": "fp16"}, r"^dtype=fp16 is not trained in full: .* use bf16, bf16_mixed or fp32"),
        ({"checkpoint": {"often": 5}}, r"^unknown key checkpoint\.often=5; checkpoint accepts every_n_steps, "),
        ({"checkpoint": {"every_n_steps": "five"}}, r"^checkpoint\.every_n_steps=five must be int >= 1 or null: "),
        ({"checkpoint": "often"}, r"^checkpoint=often must be a block with some of every_n_steps, "),
        ({"probes": [1]}, r"^probes=\[\.\.\.\] must be a mapping from names to blocks: small sets"),
        ({"probes": {"a": 7}}, r"^probes\.a=7 must be a block with some of kind, "),
        ({"probes": {"a b": {}}}, r"^probes\.a b: a name has only letters, digits, _ and -; rename it"),
        ({"probes": {"a": {"row": 7}}}, r"^unknown key probes\.a\.row=7, did you mean probes\.a\.rows\?"),
        ({"forgetting_budget": {"probe": "a"}}, r"^forgetting_budget\.max_increase is missing: largest"),
        (
            {"lr_scheduler": {"_component_": "finch.FinchLR", "eta_max": "x"}},
            r"^lr_scheduler\.eta_max=x must be number > 0 or auto: ",
        ),
        ({"lr_scheduler": {"_component_": "finch.ReplayLR"}}, r"^lr_scheduler\.log is missing: the earlier run"),
        (
            {"loss": {"_component_": "finch.objectives.TALR", "tau": None}},
            r"^loss\.tau has no value: .*; leave the key out for auto",
        ),
    ],
)
def test_check_rejects(changes, message):
    with pytest.raises(UserError, match=message):
        checked(**changes)


def test_check_reports_each_mistake_once():
    errors = []
    lr_scheduler = {"_component_": "finch.FinchLR", "eta_max": 0, "etta": 1}
    changes = {"epoch": 3, "ac_option": [], "batch_size": 0, "model": {}, "checkpoint": {"keep": 1, "async": 2}}
    cfg = OmegaConf.create({**MINIMAL, **changes, "lr_scheduler": lr_scheduler})
    check(cfg, FullFinetuneKeys, on_error=errors.append)
    keys_in_order = ["epoch", "model", "batch_size", "ac_option", "checkpoint.async", "checkpoint.keep"]
    keys_in_order += ["lr_scheduler.etta", "lr_scheduler.eta_max"]
    assert [re.split("[ =,;]", str(error).removeprefix("unknown key "))[0] for error in errors] == keys_in_order
    assert cfg.seed == 0


def test_check_fills_in_a_block_without_a_component():
    expected = {"every_n_steps": None, "every_n_minutes": 0.5, "keep_last": 1, "async": True}
    assert checked(checkpoint={"every_n_minutes": 0.5}).checkpoint == expected
    assert checked(checkpoint=None).checkpoint == checked().checkpoint
    assert checked(epochs="???").epochs == 1
    assert checked(probes={"a": {"rows": "???"}}).probes.a.top_k == 512
    assert checked(probes={"a": None}).probes is None
    assert checked(probes={"a": {"rows": None}}).probes.a.top_k == 512


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


@pytest.mark.parametrize(
    "key",
    [
        *("passwd", "pwd", "private_key", "credentials", "authorization", "webhook_url", "slack-webhook-url"),
        *("api-key", "apiKey", "accessToken", "access_token", "aws_secret_key", "apiToken", "bearer", "passphrase"),
        *("account_key", "AccountKey", "connection_string", "cookie", "signing_key", "dsn", "APIToken", "jwt"),
    ],
)
def test_keys_of_secrets(key):
    for value in ("s3cret", ["s3cret"], 12345):
        assert redacted(OmegaConf.create({key: value}))[key] in ("***", ["***"])
    shown = format_override(f"metric_logger={{_component_: x, {key}: s3cret}}") + format_override(
        f"block.{key}=s3cret a"
    )
    assert "s3cret" not in shown


def test_passwords_in_urls_are_masked_and_tokens_of_a_tokenizer_are_not():
    config = {"dsn_of": "postgres://user:s3cret@host/db?x=1", "pad_token": "<pad>", "max_new_tokens": 3, "tokens": [1]}
    text = OmegaConf.to_yaml(redacted(OmegaConf.create(config)))
    assert "postgres://***@host/db?x=1" in text
    assert all(line in text for line in ("pad_token: <pad>", "max_new_tokens: 3", "- 1"))
    with pytest.raises(UserError, match=r"source=http://\*\*\*@host"):
        checked(dataset_val={"a": "http://u:s3cret@host"}, unknown_source="http://u:s3cret@host")


# The weights of a list of datasets

ALPACA = {"_component_": "torchtune.datasets.alpaca_dataset"}


def test_weights_of_a_list_and_of_none():
    weighted = [{**ALPACA, "weight": 19}, {**ALPACA, "weight": "${general}", "split": "train"}]
    cfg = checked(dataset=weighted, general=1)
    assert dataset_weights(cfg.dataset) == [19.0, 1.0]
    assert without_weight(cfg.dataset[1]) == {**ALPACA, "split": "train"}
    assert dataset_weights(checked(dataset=ALPACA).dataset) is None
    assert dataset_weights(checked(dataset=[ALPACA, ALPACA]).dataset) is None


@pytest.mark.parametrize("weight", [0, 0.0, -0.5, ".nan", float("nan"), float("inf"), True, "x", [1], {}])
def test_weight_must_be_a_number_above_0(weight):
    with pytest.raises(UserError, match=r"^dataset\[1\]\.weight=.* must be a number above 0"):
        checked(dataset=[{**ALPACA, "weight": 1}, {**ALPACA, "weight": weight}])


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        ({**ALPACA, "weight": 1}, {}, "unknown key dataset.weight; weights belong to the entries of a list"),
        ([{**ALPACA, "weight": 1}], {}, "dataset[0].weight=1: dataset has one entry"),
        ([ALPACA, {**ALPACA, "weight": 1}], {}, "dataset[0] has no weight, but dataset[1].weight=1"),
        (ALPACA, {"dataset_validation": [{**ALPACA, "weight": 1}] * 2}, "only the entries of dataset have weights"),
        (ALPACA, {"dataset_validation": {**ALPACA, "weight": 1}}, "only the entries of dataset have weights"),
    ],
)
def test_weight_elsewhere_is_refused(dataset, changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        checked(dataset=dataset, **changes)


BLOCKS = {"dataset": [{**ALPACA, "weight": 1}, {**ALPACA, "weight": 2}], "epochs": 1}


def test_command_line_overrides_entries_of_a_list():
    cfg, _ = merge(BLOCKS, ["dataset[1].weight=0.5", "epochs=2", "dataset[0].split=train[:3]"])
    assert cfg.epochs == 2
    assert cfg.dataset == [{**ALPACA, "weight": 1, "split": "train[:3]"}, {**ALPACA, "weight": 0.5}]


@pytest.mark.parametrize("override", ["dataset[2].weight=1", "epochs[0]=1", "absent[0].weight=1"])
def test_command_line_names_an_entry_that_does_not_exist(override):
    with pytest.raises(UserError, match=re.escape(override)):
        merge(BLOCKS, [override])
