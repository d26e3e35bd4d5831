"""The keys as text, and what an unknown key's error suggests."""

import pytest
from helpers.runs import MINIMAL
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.config.key_search import OTHER_NAMES
from finch.config.schema import FullFinetuneKeys, LoraFinetuneKeys
from finch.config.validation import check

FINCH = {"_component_": "finch.FinchLR", "eta_max": 5e-5}


def error_of(key):
    cfg = OmegaConf.create({**MINIMAL, "lr_scheduler": FINCH})
    OmegaConf.update(cfg, key, 1, force_add=True)
    with pytest.raises(UserError) as caught:
        check(cfg, FullFinetuneKeys)
    return str(caught.value)


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        # other trainers' words
        ("learning_rate", "use optimizer.lr"),
        ("Learning-Rate", "use optimizer.lr"),
        ("max_steps", "use max_steps_per_epoch with epochs=1"),
        ("lr_scheduler.warmup_ratio", "use lr_scheduler.warmup_steps of FINCH"),
        # misspelt, or cut short
        ("batchsize", "did you mean batch_size?"),
        ("dataset_va", "did you mean dataset_validation?"),
        ("validation", "did you mean dataset_validation?"),
        ("checkpoint.every", "did you mean checkpoint.every_n_steps or checkpoint.every_n_minutes?"),
        ("lr_scheduler.etamax", "did you mean lr_scheduler.eta_max?"),
        # in another block
        ("eta_max", "did you mean lr_scheduler.eta_max?"),
        ("weigth_decay", "did you mean optimizer.weight_decay?"),
        ("optimizer.clip_grad_norm", "did you mean clip_grad_norm?"),
        # nothing near
        ("training.steps", "see `finch list keys`"),
        ("lr_scheduler.ocean", "finch.FinchLR accepts optimizer, eta_max, "),
    ],
)
def test_unknown_key_names_what_to_use(key, suggestion):
    error = error_of(key)
    assert error.startswith("unknown key ")
    assert suggestion in error
    assert "\n" not in error


def test_other_names_are_no_keys_and_name_existing_ones():
    known = {*LoraFinetuneKeys.model_fields, "method"}
    assert not known & set(OTHER_NAMES)
    for text in OTHER_NAMES.values():
        named = [part.partition("=")[0].rstrip(",;") for part in text.removeprefix("use ").split()]
        assert any(name.partition(".")[0] in known for name in named) or "leave it out" in text
