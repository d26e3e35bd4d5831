"""What a rank sends in a ring."""

import pytest

from finch.estimate.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective


@pytest.mark.parametrize(("kind", "sent"), [(ALL_GATHER, 750), (REDUCE_SCATTER, 750), (ALL_REDUCE, 1500)])
def test_sent_bytes_of_a_ring_of_four(kind, sent):
    assert Collective(kind, 1000, 4).sent_bytes == sent
    assert Collective(kind, 1000, 1).sent_bytes == 0
