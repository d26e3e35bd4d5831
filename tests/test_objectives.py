import torch

from finch.objectives import CrossEntropy


def test_cross_entropy_weighs_every_target_the_same():
    batch = {"labels": torch.tensor([[3, -100, 1], [-100, -100, -100]])}
    token_loss = torch.tensor([[0.5, 0.0, 2.0], [0.0, 0.0, 0.0]])
    assert torch.equal(CrossEntropy().weights(token_loss, batch), torch.ones(2, 3))
    assert CrossEntropy().count(batch) == 2
