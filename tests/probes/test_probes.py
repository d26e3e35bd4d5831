import pytest

from finch.probes.probes import MAX_SHARE, default_interval, eval_cost


@pytest.mark.parametrize("steps", [1, 7, 100, 5000])
@pytest.mark.parametrize("eval_tokens", [10, 2_000, 40_000])
def test_default_interval_keeps_the_share(steps, eval_tokens):
    """At most ten evaluations an epoch and below the share, but never fewer than the one at its end."""
    interval = default_interval(eval_tokens, 2_000, steps)
    number = -(-steps // interval)
    assert 1 <= number <= 10
    assert number == 1 or number * eval_cost(eval_tokens, 2_000) <= MAX_SHARE * steps
    if number == 1:
        assert steps == 1 or 2 * eval_cost(eval_tokens, 2_000) > MAX_SHARE * steps
