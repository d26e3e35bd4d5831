"""Self-replay for loops of one's own. test_transformers and test_equality train with it."""

import pytest
from helpers.causal_lm import make_model

from finch.base.errors import UserError
from finch.integrations.self_replay import answer_kl, measured_answers, own_answers


@pytest.mark.parametrize("is_training", [True, False])
def test_modules_keep_their_modes(is_training):
    """As where a user freezes one in evaluation mode."""
    model, options = make_model().train(is_training), {"stop_tokens": [2], "max_new_tokens": 2}
    model.model.layers[0].train(not is_training)
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2
    own_answers(model, [[1]], **options)
    assert [module.training for module in model.modules()] == modes
    answers = measured_answers(model, [[1]], top_k=8, **options)
    assert [module.training for module in model.modules()] == modes
    answer_kl(model, answers)
    assert [module.training for module in model.modules()] == modes


def test_prompt_without_a_token_is_refused():
    """Its answer's first token has no distribution, and the mean over the tokens of such answers alone would be NaN."""
    with pytest.raises(UserError, match=r"^prompts: one has no token"):
        own_answers(make_model(), [[1], []], stop_tokens=[2], max_new_tokens=2)
