"""benchmarks.speed: the block protocol on one and two ranks, ratios of paired blocks, lengths of steps; benchmarks.profile's groups."""

import os
import sys

import pytest
import torch
import torch.distributed as dist

from benchmarks.profile import GROUPS, group_of
from benchmarks.speed.blocks import Contender, ratio_interval
from benchmarks.speed.contenders import Lengths, group_by_length, linear_shapes

MATRIX, ATTENTION, ELEMENTWISE, LOSS, OPTIMIZER, REST = GROUPS


def train(settings):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    model = torch.nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.AdamW([model.weight], fused=True)
    for _ in range(settings["steps"]):
        model(torch.ones(2, 4)).sum().backward()
        if dist.is_initialized():
            dist.all_reduce(model.weight.grad)
        optimizer.step()
    print("the program is at its end", file=sys.stderr)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_blocks_count_steps_and_flops(tmp_path, ranks):
    one = Contender("tiny", train, {"steps": 7}, tmp_path, ranks=ranks)  # step 1
    # A product of [2, 4] with [4, 4], and the gradient of the weight
    assert one.flops == ranks * 2 * (2 * 2 * 4 * 4)
    plain = one.run(3)
    assert plain.operators == []
    assert plain.seconds > 0
    assert plain.peak_memory_bytes > 1e6
    seconds = dict.fromkeys(GROUPS, 0.0)
    for names, own in one.run(1, is_profiled=True).operators:
        seconds[group_of(names)] += own
    assert min(seconds[MATRIX], seconds[OPTIMIZER]) > 0
    if ranks == 1:
        one.run(2)  # 7 steps are done
        with pytest.raises(SystemExit, match="tiny has ended"):
            one.run(1)
    one.close()
    assert ("the program is at its end" in (tmp_path / "tiny.log").read_text()) == (ranks == 1)


def test_ratio_interval_pairs_blocks():
    ours, equal = [1.0, 4.0, 2.0, 8.0], ([1.0] * 4, [1.0] * 4)  # the machine's speed varies, the ratio does not
    assert ratio_interval(ours, [2 * each for each in ours], equal) == pytest.approx((2, 2, 2))
    ratio, low, high = ratio_interval([1.0, 1.0, 1.0, 1.0], [1.0, 2.0, 3.0, 2.0], equal)
    assert ratio == 2
    assert 1 <= low < ratio < high <= 3
    # Twice the time for twice the tokens is the same speed
    assert ratio_interval(ours, [2, 8, 4, 16], ([1, 4, 2, 8], [2, 8, 4, 16])) == pytest.approx((1, 1, 1))


def test_group_by_length_keeps_all_rows():
    samples = [{"tokens": [0] * length, "labels": [0] * length} for length in (1, 9, 2, 8, 3, 7, 4, 6)]
    lengths = [len(row["tokens"]) for row in group_by_length(samples, 2)]
    assert sorted(lengths) == [1, 2, 3, 4, 6, 7, 8, 9]
    assert {tuple(lengths[start : start + 2]) for start in range(0, 8, 2)} == {(1, 2), (3, 4), (6, 7), (8, 9)}


def test_lengths_count_tokens_and_targets_of_steps():
    row = {"tokens": [1, 2, 3], "labels": [-100, 2, 3]}
    all_targets = {"tokens": [1, 2], "labels": [1, 2]}  # nothing predicts the first
    assert Lengths.of([row, row, all_targets], 2) == Lengths([6, 2], [4, 1])


def test_linear_shapes_of_grouped_query_attention():
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_attention_heads": 8, "num_key_value_heads": 4}
    assert linear_shapes(sizes) == [(64, 64), (64, 32), (64, 32), (64, 64), (64, 172), (64, 172), (172, 64)]


@pytest.mark.parametrize(
    ("names", "group"),
    [
        (["aten::mm", "MmBackward0"], MATRIX),
        (["aten::_scaled_dot_product_flash_attention_for_cpu"], ATTENTION),
        (["aten::copy_", "aten::scaled_dot_product_attention"], ATTENTION),
        (["aten::silu"], ELEMENTWISE),
        (["aten::mul", "aten::linalg_vector_norm"], OPTIMIZER),
        (["aten::copy_", "aten::_log_softmax", "aten::cross_entropy_loss"], LOSS),
        (["aten::embedding"], REST),
    ],
)
def test_group_of_operators(names, group):
    assert group_of(names) == group
