import math

import pytest

from finch.training.run import describe_best, update_best


@pytest.mark.parametrize(
    ("best", "key", "value", "is_chosen"),
    [
        (None, "validation_loss", 2.0, True),
        ({"epoch": "epoch_0", "validation_loss": 2.5}, "validation_loss", 2.0, True),
        ({"epoch": "epoch_0", "validation_loss": 2.0}, "validation_loss", 2.0, False),
        ({"epoch": "epoch_0", "probe/a/accuracy": 0.5}, "probe/a/accuracy", 0.75, True),
        ({"epoch": "epoch_0", "probe/a/accuracy": 0.5}, "probe/a/accuracy", 0.25, False),
        ({"epoch": "epoch_0", "validation_loss": 2.0}, "probe/a/loss", 9.0, True),  # chosen by another metric before
        (None, "validation_loss", math.nan, False),
        (None, None, 2.0, False),
    ],
)
def test_better_compares_one_metric(best, key, value, is_chosen):
    found = update_best(best, key, "epoch_1", {"x": -9.0, str(key): value})
    assert found == ({"epoch": "epoch_1", key: value} if is_chosen else best)


def test_describe_best_has_its_unit():
    assert describe_best({"epoch": "epoch_0", "validation_loss": 2.5}) == "validation loss 2.5000 nats"
    assert describe_best({"epoch": "epoch_0", "probe/a/accuracy": 0.5}) == "probe/a/accuracy 0.5000"
