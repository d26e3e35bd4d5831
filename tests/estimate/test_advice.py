"""Which changes are tried for a step that does not fit."""

from types import SimpleNamespace

import pytest
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.config.schema import FullFinetuneKeys
from finch.config.validation import check
from finch.estimate.advice import changes, trials

RECOMPUTE, SMALL = "enable_activation_checkpointing=True", "batch_size=1"


@pytest.fixture
def cfg():
    optimizer = {"_component_": "torch.optim.AdamW", "lr": 1e-5, "fused": True}
    changed = {**MINIMAL, "optimizer": optimizer, "batch_size": 4, "gradient_accumulation_steps": 2}
    return check(OmegaConf.create(changed), FullFinetuneKeys)


def try_all(cfg, peak):
    """The changes that are tried where ``peak(overrides, ranks)`` is what each gives, with a limit of 10."""
    estimate = lambda overrides, ranks: SimpleNamespace(device_peak=peak(overrides, ranks))  # noqa: E731
    return [(trial.change.overrides, trial.change.ranks) for trial in trials(cfg, 2, 10, estimate)]


def test_changes_keep_the_samples_of_a_step(cfg):
    for change in changes(cfg, 2):
        values = dict(override.split("=") for override in change.overrides if "=" in override)
        accumulation = int(values.get("gradient_accumulation_steps", 2))
        assert int(values.get("batch_size", 4)) * accumulation * change.ranks == 16, change
    eight_bits = next(change for change in changes(cfg, 2) if "8 bits" in change.effect)
    assert eight_bits.overrides == ("optimizer._component_=torchao.optim.AdamW8bit", "~optimizer.fused")


def test_trials_end_with_the_first_change_that_is_enough(cfg):
    tried = try_all(cfg, lambda overrides, ranks: 9 if RECOMPUTE in overrides or ranks > 2 else 11)
    assert tried == [((RECOMPUTE,), 2), (("gradient_accumulation_steps=1",), 4)]


def test_changes_that_do_not_suffice_alone_are_tried_together(cfg):
    tried = try_all(cfg, lambda overrides, ranks: 9 if {RECOMPUTE, SMALL} <= set(overrides) else 11)
    assert {RECOMPUTE, SMALL, "fsdp_cpu_offload=True", "~optimizer.fused"} <= set(tried[-1][0])
    assert [ranks for _, ranks in tried] == [2, 2, 4, 8, 16, 2, 2, 2]


def test_nothing_is_tried_that_the_config_has(cfg):
    cfg.enable_activation_checkpointing, cfg.batch_size, cfg.fsdp_cpu_offload = True, 1, True
    cfg.optimizer._component_ = "torch.optim.SGD"
    assert all(change.ranks > 2 for change in changes(cfg, 2))
