"""Losses read from a model's output, against its logits, and the objectives that are refused. test_transformers trains with the others."""

from types import SimpleNamespace

import pytest
import torch
from helpers.causal_lm import collate, make_model, make_token_rows, mean_loss

from finch.base.errors import UserError
from finch.integrations.objective_loss import LossReader, ObjectiveLoss
from finch.integrations.transformers import _WithTerm
from finch.objectives import STM, TALR

ROWS = make_token_rows(6)


def read(reader, rows, **changes):
    batch = collate(rows)
    output = make_model()(**batch)
    output = SimpleNamespace(**{"loss": output.loss, "logits": output.logits, **changes})
    loss_sum, num_targets = reader.read(output, batch)
    reader.decide()
    return float(loss_sum / num_targets)


def test_plain_loss_of_the_model_is_used_after_a_first_comparison():
    reader = LossReader()
    assert read(reader, ROWS) == pytest.approx(mean_loss(make_model(), ROWS), rel=1e-6)
    for logits in (None, torch.zeros(2, 99, 64)):  # not looked at again
        assert read(reader, ROWS[:2], logits=logits) == pytest.approx(mean_loss(make_model(), ROWS[:2]), rel=1e-6)


def test_loss_with_an_extra_term_is_not_used():
    reader = LossReader()
    for rows in (ROWS, ROWS[:2]):
        assert read(reader, rows, loss=torch.tensor(99.0)) == pytest.approx(mean_loss(make_model(), rows), rel=1e-6)


def test_term_of_self_replay_is_no_part_of_the_loss():
    reader, batch = LossReader(), collate(ROWS)
    for logits_factor in (1.0, 0.0):  # the second time not looked at
        output = make_model()(**batch)
        output.loss = _WithTerm.apply(output.loss, output.logits.sum(), [False])
        output.logits = output.logits * logits_factor
        loss_sum, num_targets = reader.read(output, batch)
        reader.decide()
        assert float(loss_sum / num_targets) == pytest.approx(mean_loss(make_model(), ROWS), rel=1e-6)


def test_penalty_that_is_zero_in_the_first_step_is_not_used():
    """Neither in the run, nor in one that is resumed where the penalty is small."""
    for strengths in ((0.0, 1.0), (1e-6, 0.1)):
        reader = LossReader()
        for strength in strengths:
            model, batch = make_model(), collate(ROWS)
            output = model(**batch)
            output.loss = output.loss + strength * sum(weight.square().sum() for weight in model.parameters())
            loss_sum, num_targets = reader.read(output, batch)
            reader.decide()
            assert float(loss_sum / num_targets) == pytest.approx(mean_loss(make_model(), ROWS), rel=1e-6)


def test_auxiliary_loss_that_is_small_at_first_is_not_used():
    reader, plain = LossReader(), mean_loss(make_model(), ROWS)
    assert read(reader, ROWS, loss=torch.tensor(plain * 1.0005), aux_loss=torch.ones(())) == pytest.approx(
        plain, rel=1e-6
    )
    assert read(reader, ROWS, loss=torch.tensor(plain + 1.0), aux_loss=torch.ones(())) == pytest.approx(plain, rel=1e-6)


def test_logits_of_virtual_tokens_are_left_out():
    logits = make_model()(**collate(ROWS)).logits
    longer = torch.cat([torch.zeros(len(ROWS), 3, logits.shape[-1]), logits], dim=1)
    assert read(LossReader(), ROWS, logits=longer, loss=None) == pytest.approx(mean_loss(make_model(), ROWS), rel=1e-6)


def test_output_without_loss_and_logits_is_refused():
    with pytest.raises(UserError, match=r"^model=SimpleNamespace: FINCH needs logits"):
        read(LossReader(), ROWS, loss=None, logits=None)


@pytest.mark.parametrize(("objective", "message"), [(STM(), "needs pretrained_token_loss"), (TALR(), "statistic=auto")])
def test_objective_that_needs_more_is_refused(objective, message):
    with pytest.raises(UserError, match=message):
        ObjectiveLoss(objective)
