"""Objectives, the pull toward the pretrained weights and the replay, on the recipe: the same on every layout, and as defined."""

import json
import math

import pytest
import torch
import yaml
from helpers.ranks import on_ranks
from helpers.runs import make_config, relative_l2, run_here, weights, write_rows

pytestmark = pytest.mark.slow

OBJECTIVES = {
    "flow": {"loss._component_": "finch.objectives.FLOW"},
    "dft": {"loss._component_": "finch.objectives.DFT"},
    "talr": {"loss._component_": "finch.objectives.TALR", "loss.tau": "exact"},
    "talr lagged": {"loss._component_": "finch.objectives.TALR", "loss.tau": "lagged"},
    "stm": {"loss._component_": "finch.objectives.STM", "loss.threshold": "40.0"},
    "stm few": {"loss._component_": "finch.objectives.STM", "loss.threshold": "12.0"},  # most micro-batches keep none
    "eaft": {"loss._component_": "finch.objectives.EAFT"},
    "l2": {"regularizer._component_": "finch.regularization.L2", "regularizer.strength": "0.1"},
    "kl": {"kl_penalty._component_": "finch.regularization.KL", "kl_penalty.strength": "0.5"},
    "asft": {"kl_penalty._component_": "finch.regularization.KL", "loss._component_": "finch.objectives.DFT"},
    "stm few kl": {
        "kl_penalty._component_": "finch.regularization.KL",
        "loss._component_": "finch.objectives.STM",
        "loss.threshold": "12.0",
    },
    "kl cached": {
        "kl_penalty._component_": "finch.regularization.KL",
        "kl_penalty.reference": "cached",
        "kl_penalty.top_k": "5",
    },
}


def overrides(changes):
    return [f"{key}={value}" for key, value in changes.items()]


@pytest.fixture(scope="module")
def config(tmp_path_factory, base_folder):
    """30 rows, 8 a step, two of them without any target token and in one micro-batch of every layout's."""
    import random

    random.seed(5)
    folder = tmp_path_factory.mktemp("methods")
    write_rows(folder / "rows.jsonl", 30)
    lines = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    for index in (0, 4, 8, 9):
        lines[index]["question"] = (
            "the old red fox sings near a stone " * 12
        )  # longer than max_seq_len: no target token
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changes = {"dtype": "fp64", "batch_size": 2, "gradient_accumulation_steps": 4, "shuffle": False}
    return make_config(base_folder, folder / "rows.jsonl", folder / "run", **changes)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """Each objective in one process with four micro-batches, FINCH on top."""
    folder = tmp_path_factory.mktemp("alone")
    runs = {}
    for name, changes in OBJECTIVES.items():
        runs[name] = run_here(folder, {**config, "output_dir": str(folder / name)}, *overrides(changes))
        assert runs[name].returncode == 0, runs[name].output
    return runs


@pytest.mark.parametrize("ranks", [2, 4])
def test_objective_equals_one_process_on_every_layout(ranks, config, alone, tmp_path):
    """{1x4, 2x2, 4x1} in float64; one start of torchrun runs them all."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({**config, "gradient_accumulation_steps": 4 // ranks}))
    (tmp_path / "objectives.json").write_text(json.dumps({name: overrides(OBJECTIVES[name]) for name in OBJECTIVES}))
    code = """
        import torch.distributed as dist
        import finch_full_finetune
        from finch.distributed import parallel
        start_group = dist.init_process_group  # once for all runs
        dist.init_process_group = lambda *args, **options: dist.is_initialized() or start_group(*args, **options)
        parallel.stop = lambda: None
        start = ["x", "--config", str(folder / "config.yaml"), "debug_checks=True"]
        for name, changes in json.loads((folder / "objectives.json").read_text()).items():
            sys.argv = [*start, f"output_dir={folder / name}", *changes]
            finch_full_finetune.recipe_main()
        tell(True)
    """
    on_ranks(ranks, code, tmp_path, timeout=90)
    for name, one in alone.items():
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for column in ("loss", "ema_loss", "lr", "grad_norm", *(["kl"] if "kl" in lines[0] else [])):
            assert [line[column] for line in lines] == pytest.approx(one.column(column), rel=1e-12), (name, column)
        assert relative_l2(weights(tmp_path / name / "epoch_0"), weights(one.folder / "epoch_0")) < 1e-12, name


def test_objectives_differ_and_finch_uses_raw_loss(alone, config, tmp_path):
    plain = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "plain")})
    ends = {name: run.column("loss")[-1] for name, run in alone.items()} | {"plain": plain.column("loss")[-1]}
    assert len({round(loss, 9) for loss in ends.values()}) == len(ends), ends
    first = {round(run.column("loss")[0], 12) for run in alone.values()}
    assert first == {round(plain.column("loss")[0], 12)}  # before any update the raw loss knows no objective
    kept = {name: float(alone[name].output.split("target tokens (")[1].split("%")[0]) for name in ("stm", "stm few")}
    assert 0 < kept["stm few"] < 8 < kept["stm"] < 100
    for name in ("talr", "talr lagged"):
        assert "TALR: tau is the median sequence loss of the step" in alone[name].output
        assert all(tau > 0 for tau in alone[name].column("tau"))


@pytest.mark.parametrize("name", ["flow", "stm", "talr lagged", "l2", "asft", "kl cached"])
def test_objective_resumes_bitwise(name, config, alone, tmp_path):
    """The pass is not made again with tuned weights, the median and theta0 are those of the straight run."""
    straight = run_here(
        tmp_path, {**config, "epochs": 2, "output_dir": str(tmp_path / "straight")}, *overrides(OBJECTIVES[name])
    )
    folder = tmp_path / "run"
    once = {**config, "output_dir": str(folder)}
    assert run_here(tmp_path, once, *overrides(OBJECTIVES[name])).returncode == 0
    lost = {"flow": "pretrained.safetensors", "kl cached": "pretrained_top_k.safetensors"}
    if name in lost:  # then made again, with the pretrained weights
        (folder / lost[name]).unlink()
    resumed = run_here(tmp_path, once, *overrides(OBJECTIVES[name]), "epochs=2", "resume_from_checkpoint=True")
    assert resumed.returncode == 0, resumed.output
    assert ("the pretrained model's losses are read from" in resumed.output) == (name == "stm")
    assert resumed.column("loss") == straight.column("loss")
    one, other = weights(resumed.folder / "epoch_1"), weights(straight.folder / "epoch_1")
    assert all(torch.equal(one[key], other[key]) for key in other)


def test_resume_with_another_objective_raises(config, alone):
    message = run_here(
        alone["dft"].folder.parent,
        {**config, "output_dir": str(alone["dft"].folder)},
        *overrides(OBJECTIVES["flow"]),
        "resume_from_checkpoint=True",
    )
    assert "belongs to a run with loss=" in message.error()


def test_reference_losses_are_reused_in_the_same_folder(config, tmp_path):
    changed = {**config, "output_dir": str(tmp_path / "run")}
    first = run_here(tmp_path, changed)
    assert first.returncode == 0
    assert "pretrained model's mean loss over 30 training samples" in first.output
    again = run_here(tmp_path, changed, "overwrite=True")
    assert "the pretrained model's losses are read from" in again.output
    assert again.column("lr") == first.column("lr")
    other = run_here(tmp_path, changed, "overwrite=True", "tokenizer.max_seq_len=40")
    assert "pretrained model's mean loss over 30 training samples" in other.output


def test_objective_weights_are_the_same_when_packed(config, tmp_path):
    """FLOW and STM on packed rows: the loss of the first step, whose batch is all rows, has the gradient of the unpacked ones."""
    for name in ("flow", "stm", "talr"):
        norms = {}
        for packed in (False, True):
            rows = "train[10:30]"
            changed = {**config, "output_dir": str(tmp_path / f"{name}{packed}"), "max_steps_per_epoch": 1}
            changed["dataset"] = {**config["dataset"], "split": rows, "packed": packed}
            run = run_here(
                tmp_path,
                changed,
                *overrides(OBJECTIVES[name]),
                f"batch_size={1 if packed else 20}",
                f"gradient_accumulation_steps={PACKS if packed else 1}",
            )
            assert run.returncode == 0, run.output
            norms[packed] = run.column("grad_norm")[0]
        assert norms[True] == pytest.approx(norms[False], rel=1e-6), name


PACKS = 3


def test_replay_repeats_only_the_learning_rates(config, tmp_path):
    finch = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "finch")})
    schedule = {"_component_": "finch.ReplayLR", "log": str(tmp_path / "finch")}
    replay = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "replay"), "lr_scheduler": schedule})
    assert replay.returncode == 0, replay.output
    for column in ("lr", "loss", "grad_norm"):
        assert replay.column(column) == finch.column(column)
    other = run_here(
        tmp_path,
        {
            **config,
            "output_dir": str(tmp_path / "other"),
            "lr_scheduler": schedule,
            "optimizer": {**config["optimizer"], "lr": 1.0},
        },
        "seed=7",
        "shuffle=True",
    )
    assert other.column("lr") == finch.column("lr")
    assert other.column("loss") != finch.column("loss")
    mean = run_here(
        tmp_path, {**config, "output_dir": str(tmp_path / "mean"), "lr_scheduler": {**schedule, "shape": "mean"}}
    )
    rates = finch.column("lr")
    assert mean.column("lr") == pytest.approx([sum(rates) / len(rates)] * len(rates), rel=1e-12)
    assert len(set(rates)) > 1
    wrong = run_here(
        tmp_path, {**config, "output_dir": str(tmp_path / "flat"), "lr_scheduler": {**schedule, "shape": "flat"}}
    )
    assert "lr_scheduler: shape='flat' must be one of curve, linear, mean" in wrong.error()
    assert not (tmp_path / "flat").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["loss._component_=finch.objectives.STM", "loss.threshold=1.0001"],
            "loss: STM with threshold=1.0001 keeps 0 of",
        ),
        (
            ["loss._component_=finch.objectives.TALR", "loss.tau=soon"],
            "loss: tau='soon' must be 'auto', 'exact', 'lagged' or a number",
        ),
        (["loss=finch.objectives.TALRR"], "did you mean TALR"),
        (["regularizer._component_=finch.regularization.L2", "regularizer.form=cubic"], "regularizer: form='cubic'"),
        (
            [
                "regularizer=finch.regularization.L2",
                "optimizer_in_bwd=True",
                "clip_grad_norm=null",
                "gradient_accumulation_steps=1",
            ],
            "optimizer_in_bwd=True excludes regularizer=finch.regularization.L2",
        ),
    ],
)
def test_objective_mistakes_raise_one_line(changes, message, config, tmp_path):
    run = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "run")}, *changes)
    assert run.returncode == 1
    assert message in run.error()
    assert not list((tmp_path / "run").glob("epoch_*"))


def test_replay_of_the_run_it_would_overwrite_raises(config, tmp_path):
    finch = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "run")})
    schedule = {"_component_": "finch.ReplayLR", "log": str(tmp_path / "run")}
    run = run_here(
        tmp_path, {**config, "output_dir": str(tmp_path / "run"), "lr_scheduler": schedule}, "overwrite=True"
    )
    assert "overwrite=True would remove lr_scheduler.log=" in run.error()
    assert run.column("lr") == finch.column("lr")


def test_replay_shorter_than_the_run_raises(config, tmp_path):
    finch = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "finch")})
    steps = len(finch.column("lr"))
    schedule = {"_component_": "finch.ReplayLR", "log": str(tmp_path / "finch")}
    run = run_here(tmp_path, {**config, "output_dir": str(tmp_path / "run"), "lr_scheduler": schedule, "epochs": 2})
    assert f"holds {steps} steps, the run takes {2 * steps}" in run.error()
    assert not (tmp_path / "run").exists()
    assert math.isfinite(finch.column("lr")[0])
