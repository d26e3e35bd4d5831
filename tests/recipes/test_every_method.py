"""Objectives, the pull toward the pretrained weights and the replay, on the recipe: the same on every layout, and as defined."""

import pytest
from helpers.runs import assert_close_runs, finished, make_config, run_here, run_ranks, write_rows

COLUMNS = ("loss", "ema_loss", "lr", "grad_norm", "num_target_tokens")
KL, DFT = "kl_penalty._component_=finch.regularization.KL", "loss._component_=finch.objectives.DFT"
STM, TALR = "loss._component_=finch.objectives.STM", "loss._component_=finch.objectives.TALR"
CACHED, REPLAY = "kl_penalty.reference=cached", "self_replay.max_new_tokens=5"
OBJECTIVES = {
    "flow": ["loss._component_=finch.objectives.FLOW"],
    "dft": [DFT],
    "talr": [TALR, "loss.tau=exact"],
    "talr lagged": [TALR, "loss.tau=lagged"],
    "stm": [STM, "loss.threshold=40.0"],
    "stm few": [STM, "loss.threshold=12.0"],  # most micro-batches keep none
    "eaft": ["loss._component_=finch.objectives.EAFT"],
    "l2": ["regularizer._component_=finch.regularization.L2", "regularizer.strength=0.1"],
    "kl": [KL, "kl_penalty.strength=0.5"],
    "asft": [KL, DFT],
    "stm few kl": [KL, STM, "loss.threshold=12.0"],
    "kl cached": [KL, CACHED, "kl_penalty.top_k=5"],
    "self_replay": [REPLAY, "self_replay.rows=7", "self_replay.strength=2"],
    "stm few kl cached self_replay": [KL, CACHED, STM, "loss.threshold=12.0", REPLAY, "self_replay.share=0.7"],
}

OF_ALL_RANKS = ["talr", "talr lagged", "stm few kl cached self_replay"]


@pytest.fixture(scope="module")
def config(tmp_path_factory, base_folder):
    """30 rows, 8 per step, some of them without any target token and in one micro-batch of every layout's."""
    folder = tmp_path_factory.mktemp("methods")
    write_rows(folder / "rows.jsonl", 30, seed=5, without_targets=(0, 4, 8, 9))
    changes = {"dtype": "fp64", "batch_size": 2, "gradient_accumulation_steps": 4, "shuffle": False}
    return make_config(base_folder, folder / "rows.jsonl", folder / "run", **changes)


@pytest.fixture(scope="module")
def alone(config, trained):
    """Each objective in one process with four micro-batches, FINCH on top."""
    return {name: trained(config, *changes) for name, changes in OBJECTIVES.items()}


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 2) for name in OBJECTIVES), *((name, 4) for name in OF_ALL_RANKS)]
)
def test_objective_equals_one_process_on_every_layout(name, ranks, config, alone, tmp_path):
    """{1x4, 2x2} in float64, and 4x1 where what a rank does depends on the others' rows."""
    config = {**config, "gradient_accumulation_steps": 4 // ranks, "output_dir": str(tmp_path / "run")}
    run = run_ranks(ranks, tmp_path, config, *OBJECTIVES[name], "debug_checks=True")
    columns = [column for column in (*COLUMNS, "kl", "replay_kl", "num_replayed") if column in alone[name].metrics()[0]]
    assert_close_runs(run, alone[name], 1e-12, columns=columns)


def test_objectives_differ_and_finch_uses_raw_loss(alone, config, trained):
    plain = trained(config)
    ends = {name: run.column("loss")[-1] for name, run in alone.items()} | {"plain": plain.column("loss")[-1]}
    assert len({round(loss, 9) for loss in ends.values()}) == len(ends), ends
    first = {round(run.column("loss")[0], 12) for run in alone.values()}
    assert first == {round(plain.column("loss")[0], 12)}  # before any update the raw loss knows no objective
    kept = {name: float(alone[name].output.split("target tokens (")[1].split("%")[0]) for name in ("stm", "stm few")}
    assert 0 < kept["stm few"] < 8 < kept["stm"] < 100
    for name in ("talr", "talr lagged"):
        assert "TALR: tau is the median sequence loss of the step" in alone[name].output
        assert all(tau > 0 for tau in alone[name].column("tau"))


def test_reference_losses_are_reused_in_the_same_folder(config, tmp_path):
    first = finished(tmp_path, config)
    assert "pretrained model's mean loss over 30 training samples" in first.output
    again = finished(tmp_path, config, "overwrite=True")
    assert "the pretrained model's losses are read from" in again.output
    assert again.column("lr") == first.column("lr")
    other = finished(tmp_path, config, "overwrite=True", "tokenizer.max_seq_len=40")
    assert "pretrained model's mean loss over 30 training samples" in other.output


@pytest.mark.parametrize("name", ["flow", "stm", "talr"])
def test_objective_weights_are_the_same_when_packed(name, config, tmp_path):
    """The loss of the first step, whose batch is all rows, has the gradient of the unpacked ones."""
    norms = []
    for packed, batch, micro_batches in ((False, 20, 1), (True, 1, 3)):
        dataset = {**config["dataset"], "split": "train[10:30]", "packed": packed}
        changed = {**config, "dataset": dataset, "batch_size": batch, "gradient_accumulation_steps": micro_batches}
        run = finished(tmp_path / str(packed), changed, *OBJECTIVES[name], "max_steps_per_epoch=1")
        norms.append(run.column("grad_norm")[0])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_replay_repeats_only_the_learning_rates(config, trained, tmp_path):
    finch, schedule = trained(config), {"_component_": "finch.ReplayLR", "log": str(trained(config).folder)}
    config = {**config, "lr_scheduler": schedule}

    def replayed(name, *changes):
        return run_here(tmp_path, {**config, "output_dir": str(tmp_path / name)}, *changes)

    replay = replayed("replay")
    assert replay.columns("lr", "loss", "grad_norm") == finch.columns("lr", "loss", "grad_norm")
    other = replayed("other", "seed=7", "shuffle=True", "optimizer.lr=1.0")
    assert other.column("lr") == finch.column("lr")
    assert other.column("loss") != finch.column("loss")
    rates = finch.column("lr")
    mean = replayed("mean", "lr_scheduler.shape=mean")
    assert mean.column("lr") == pytest.approx([sum(rates) / len(rates)] * len(rates), rel=1e-12)
    assert len(set(rates)) > 1
    for change, message in (
        ("lr_scheduler.shape=flat", "lr_scheduler.shape=flat must be curve, linear or mean"),
        ("epochs=2", f"holds {len(rates)} steps, the run takes {2 * len(rates)}"),
    ):
        assert message in replayed("wrong", change).error()
        assert not (tmp_path / "wrong").exists()
    removed = replayed("replay", "overwrite=True", f"lr_scheduler.log={tmp_path / 'replay'}")
    assert "overwrite=True removes lr_scheduler.log=" in removed.error()
    assert removed.column("lr") == rates
