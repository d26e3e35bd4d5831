"""Live storages by part, and what a rank sends in a ring."""

import pytest
import torch

from finch.plan.estimate.step_trace import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective, LiveMemory


@pytest.fixture
def memory():
    return LiveMemory()


def test_a_storage_counts_once_until_it_is_freed(memory):
    tensor = torch.zeros(100)
    memory.add(tensor, "one")
    memory.add(tensor[:10], "other")  # a view: the same storage
    assert (memory.total, memory.live()) == (400, {"one": 400})
    del tensor
    assert (memory.total, memory.peak, memory.live(), memory.at_peak()) == (0, 400, {}, {"one": 400})


def test_the_peak_keeps_its_parts_and_its_phase(memory):
    kept = torch.zeros(10)
    memory.add(kept, "kept", "forward")
    memory.add(torch.zeros(100), "freed", "backward")  # freed at once
    memory.add(torch.zeros(50), "smaller", "update")
    assert (memory.peak, memory.peak_phase, memory.at_peak()) == (440, "backward", {"kept": 40, "freed": 400})
    memory.reset_peak()
    assert (memory.peak, memory.at_peak()) == (40, {"kept": 40})


def test_a_storage_has_its_last_part_at_the_peak_too(memory):
    early, late = torch.zeros(10), torch.zeros(20)
    memory.add(early, "activations")
    memory.add(torch.zeros(100), "freed")
    memory.add(late, "activations")  # after the peak
    memory.assign(early, "gradients")
    memory.assign(late, "gradients")
    assert memory.at_peak() == {"gradients": 40, "freed": 400}
    assert memory.live() == {"gradients": 120}


def test_a_resized_storage_has_its_new_size(memory):
    tensor = torch.zeros(100)
    storage = tensor.untyped_storage()
    memory.add(tensor, "gathered")
    storage.resize_(0)
    memory.resize(storage)
    assert (memory.total, memory.peak) == (0, 400)
    storage.resize_(800)
    memory.resize(storage)
    assert (memory.total, memory.peak) == (800, 800)


@pytest.mark.parametrize(("kind", "sent"), [(ALL_GATHER, 750), (REDUCE_SCATTER, 750), (ALL_REDUCE, 1500)])
def test_sent_bytes_of_a_ring_of_four(kind, sent):
    assert Collective(kind, 1000, 4, 3).sent_bytes == sent
    assert Collective(kind, 1000, 1, 0).sent_bytes == 0
