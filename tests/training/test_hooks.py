"""Hooks of a config: state that resumes, requests of one rank that all follow, one order on all ranks, no read that no hook asked for."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from helpers.ranks import on_ranks
from helpers.runs import (
    ROOT,
    assert_same_run,
    assert_same_weights,
    before_steps,
    make_config,
    run_broken,
    run_here,
    run_ranks,
    validated,
)
from omegaconf import OmegaConf
from torchtune import training

from finch.base import status
from finch.distributed.parallel import Parallel
from finch.training.checkpointer import Stop, TrainState
from finch.training.hooks import StepChecks
from finch.training.run import RunLock
from finch.weights.huggingface import HuggingFaceFolder

OWN_HOOKS = """
import json, os
import torch
from finch.training.hooks import Hook

class Recorder(Hook):
    def __init__(self, stop_at=None, save_at=None, rank=1, pause_at=None):
        self.stop_at, self.save_at, self.pause_at, self.is_asking = stop_at, save_at, pause_at, os.environ.get("RANK", "0") == str(rank)
        self.calls = []

    def needs_pretrained(self, trainer): self.calls.append("needs_pretrained"); return False
    def prepare(self, trainer): self.calls.append("prepare")
    def start(self, trainer): self.calls.append("start"); self.run = trainer.run.path
    def before_step(self, state): self.calls.append(f"before_step {state.step}")

    def after_step(self, state):
        self.calls.append(f"after_step {state.step}")
        if self.is_asking and state.step == self.save_at:
            state.request_save()
        if self.is_asking and state.step == self.stop_at:
            state.request_stop("enough")
        return {"twice_the_step": 2 * state.step}

    def after_epoch(self, state):
        self.calls.append("after_epoch")
        if self.is_asking and state.epoch == self.pause_at:
            state.request_stop("a pause", is_finished=False, is_requeued=True)

    def after_export(self, state, name): self.calls.append(f"after_export {name}")
    def may_save(self, state): self.calls.append("may_save"); return state.step != 7
    def after_training(self, state): self.calls.append("after_training")
    def summary(self, state): return ["recorded"]

    def close(self):
        self.calls.append("close")
        (self.run / f"calls_{os.environ.get('RANK', '0')}.json").write_text(json.dumps(self.calls))

class Failing(Hook):
    def after_step(self, state): raise RuntimeError("of the step")
    def close(self): raise RuntimeError("of the end")

class NoHook:
    pass

class Misspelt(Hook):
    def befor_step(self, state):
        pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with hooks in it, which Python finds."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "own_hooks.py").write_text(OWN_HOOKS)
    shutil.copy(ROOT / "examples" / "weight_average.py", folder)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def recorder(**arguments):
    return {"recorder": {"_component_": "own_hooks.Recorder", **arguments}}


def weights_of(folder):
    """By torchtune's names."""
    return dict(HuggingFaceFolder(str(folder)).weights())


def test_example_averages_the_weights_and_resumes(folder, base_folder, rows_file, tmp_path, monkeypatch):
    """Against a plain loop in float64; a run that was broken off in the second epoch ends with the same bits."""
    config = make_config(base_folder, rows_file, tmp_path / "run", epochs=2, checkpoint={"every_n_steps": 3})
    config["hooks"] = {"average": {"_component_": "weight_average.WeightAverage", "decay": 0.9}}
    before = []
    with monkeypatch.context() as patch:
        before_steps(patch, lambda recipe: before.append(copy.deepcopy(dict(recipe.model.decoder.named_parameters()))))
        straight = run_here(tmp_path / "a", {**config, "output_dir": str(tmp_path / "straight")})
    assert straight.returncode == 0, straight.output
    expected = {name: weight.double() for name, weight in weights_of(base_folder).items()}
    for now in before[1:12]:  # an epoch has 11 steps
        expected = {name: 0.9 * average + 0.1 * now[name].detach().double() for name, average in expected.items()}
    for name, weight in weights_of(straight.folder / "epoch_0_average").items():
        torch.testing.assert_close(weight.double(), expected.pop(name), rtol=1e-5, atol=1e-7, msg=name)
    assert not expected
    run_broken(tmp_path / "b", config, monkeypatch, 14)
    assert_same_run(run_here(tmp_path / "b", config, "resume_from_checkpoint=True"), straight)
    assert (straight.folder / "epoch_1_average" / "model.safetensors").exists()  # and so compared


def test_average_is_the_same_on_two_ranks_and_resumes_on_one(folder, base_folder, rows_file, tmp_path):
    config = make_config(base_folder, rows_file, tmp_path / "one", epochs=2)
    config["hooks"] = {"average": {"_component_": "weight_average.WeightAverage", "decay": 0.9}}
    one = run_here(tmp_path / "a", config)
    half = {**config, "output_dir": str(tmp_path / "two"), "batch_size": 2}
    assert run_ranks(2, folder, {**half, "epochs": 1}).returncode == 0
    two = run_here(tmp_path / "b", {**half, "batch_size": 4}, "resume_from_checkpoint=True")
    assert two.returncode == 0, two.output
    for epoch in ("epoch_0_average", "epoch_1_average"):
        found, expected = weights_of(two.folder / epoch), weights_of(one.folder / epoch)
        assert all(torch.allclose(found[key], expected[key], atol=1e-5) for key in expected)


def test_hook_added_at_a_resume_starts_from_the_weights_of_then(folder, base_folder, rows_file, tmp_path):
    config = make_config(base_folder, rows_file, tmp_path / "run")
    run_here(tmp_path / "a", config)
    config["hooks"] = {"average": {"_component_": "weight_average.WeightAverage", "decay": 0.0}}
    resumed = run_here(tmp_path / "a", {**config, "epochs": 2}, "resume_from_checkpoint=True")
    assert "hooks.average has no state in" in resumed.output
    one, other = weights_of(resumed.folder / "epoch_1"), weights_of(resumed.folder / "epoch_1_average")
    assert all(torch.equal(one[key], other[key]) for key in other)


def test_one_ranks_requests_are_those_of_all_in_one_order(folder, base_folder, rows_file, tmp_path):
    config = make_config(base_folder, rows_file, tmp_path / "run", batch_size=2, epochs=2)
    config["hooks"] = recorder(save_at=4, stop_at=9)
    run = run_ranks(2, folder, config)
    assert run.returncode == 0, run.output
    steps = [name for step in range(9) for name in (f"before_step {step}", f"after_step {step + 1}")]
    steps.insert(8, "may_save")
    ends = ["may_save", "after_epoch", "after_export epoch_0", "after_training", "close"]
    expected = ["needs_pretrained", "prepare", "start", *steps, *ends]
    assert [json.loads((run.folder / f"calls_{rank}.json").read_text()) for rank in (0, 1)] == [expected] * 2
    assert run.column("twice_the_step") == [2 * step for step in range(1, 10)]
    assert "recorded" in run.output
    assert (run.folder / "checkpoints" / "step_9").is_dir()
    assert [path.name for path in run.folder.glob("epoch_*")] == ["epoch_0"]


def test_stop_within_an_epoch_saves_its_model_and_says_why(folder, base_folder, rows_file, tmp_path, trained):
    """Without the hook the run then goes on from that step."""
    config = validated(make_config(base_folder, rows_file, tmp_path / "run", epochs=2))
    run = run_here(tmp_path / "a", {**config, "hooks": recorder(stop_at=4, rank=0)})
    assert "stopped by enough\nbest epoch: 1 of 1, validation loss " in run.output
    found = status.read(run.folder / "status.json")
    assert (found["stopped_by"], found["is_finished"]) == ("enough", True)
    short = run_here(tmp_path / "b", {**config, "output_dir": str(tmp_path / "b")}, "epochs=1", "max_steps_per_epoch=4")
    assert_same_weights(run.folder / "best", short.folder / "epoch_0")
    assert run.metrics(validation=True) == short.metrics(validation=True)
    assert_same_run(run_here(tmp_path / "a", config, "resume_from_checkpoint=True"), trained(config))


def test_a_pause_after_an_epoch_goes_on(folder, base_folder, rows_file, tmp_path, trained):
    config = validated(make_config(base_folder, rows_file, tmp_path / "run", epochs=2, save_best_only=True))
    paused = run_here(tmp_path / "a", {**config, "hooks": recorder(pause_at=0, rank=0)})
    assert (paused.folder / "REQUEUE").is_file()
    assert (
        "stopped by a pause after step 11; the same command with resume_from_checkpoint=True continues" in paused.output
    )
    assert len(paused.column("loss")) == 11
    assert_same_run(run_here(tmp_path / "a", config, "resume_from_checkpoint=True"), trained(config))


def test_stop_at_an_epochs_end_exports_it_and_a_refused_save_is_left_out(folder, base_folder, rows_file, tmp_path):
    config = make_config(base_folder, rows_file, tmp_path / "run", epochs=3)
    config["hooks"] = recorder(save_at=7, stop_at=11, rank=0)
    run = run_here(tmp_path / "a", config)
    assert run.returncode == 0, run.output
    assert "the state of step 7 is not saved: a hook has refused" in run.output
    calls = json.loads((run.folder / "calls_0.json").read_text())
    assert calls[-6:] == ["after_step 11", "after_epoch", "after_export epoch_0", "may_save", "after_training", "close"]
    assert "last epoch: 1 of 1" in run.output


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        ({"validation": {"_component_": "own_hooks.Recorder"}}, "hooks.validation is the name of a hook of the recipe"),
        (
            {"x": {"_component_": "own_hooks.NoHook"}},
            "hooks.x._component_=own_hooks.NoHook is no finch.training.hooks.Hook",
        ),
        ({"x": {"_component_": "own_hooks.Nothing"}}, "hooks.x._component_=own_hooks.Nothing does not exist"),
        (
            {"x": {"_component_": "own_hooks.Misspelt"}},
            "a method befor_step, which is none of a hook's, did you mean before_step?",
        ),
        ({"x": {"_component_": "own_hooks.Recorder", "stopp_at": 1}}, "hooks.x.stopp_at"),
        ({"x": {"_component_": "weight_average.WeightAverage", "decay": 2}}, "hooks.x: decay=2 must be in [0, 1)"),
    ],
)
def test_mistakes_in_hooks_are_one_line(hooks, message, folder, base_folder, rows_file, tmp_path):
    run = run_here(tmp_path / "a", make_config(base_folder, rows_file, tmp_path / "run", hooks=hooks))
    assert message in run.error()


def test_what_ended_a_run_is_told_also_where_closing_it_fails(folder, base_folder, rows_file, tmp_path):
    config = make_config(base_folder, rows_file, tmp_path / "run")
    with pytest.raises(RuntimeError, match="of the step"):
        run_here(tmp_path / "a", {**config, "hooks": {"x": {"_component_": "own_hooks.Failing"}}})
    assert RunLock(tmp_path / "run").holder() is None  # what is closed after the hook was closed as well


def test_no_hook_reads_the_device_unless_one_wanted_to(folder, base_folder, rows_file, tmp_path):
    """After a step for which no hook's wants_sync is true, every hook of the recipe runs without a read on the host."""
    code = """
        import json
        from helpers.step_cost import HostReads, start, steps
        recipe = start(str(folder / "config.yaml"))
        found, reads = [], HostReads()
        for group in recipe.update.optimizers[0].param_groups:
            group["lr"] = torch.tensor(group["lr"])  # as on a GPU
        for batches in steps(recipe, 4):
            for hook in recipe.hooks.values():
                hook.before_step(recipe.state)
            recipe.state.metrics = recipe.train_step(batches)
            recipe.state.advance(recipe.data.order, recipe.data.steps_per_epoch)
            recipe.state.is_synced = any(hook.wants_sync(recipe.state.step) for hook in recipe.hooks.values())
            found.append(recipe.state.is_synced)
            if not recipe.state.is_synced:
                with reads:
                    reads.is_started = True
                    for hook in recipe.hooks.values():
                        hook.after_step(recipe.state)
        tell(found)
        recipe.close()
    """
    probes = {"old": {"data_files": str(rows_file), "rows": 4, "every_n_steps": 3}}
    config = make_config(base_folder, rows_file, tmp_path / "run", log_every_n_steps=4, probes=probes)
    folder.joinpath("config.yaml").write_text(json.dumps(config))
    assert on_ranks(1, code, folder) == [[False, False, True, False]]  # the probes


@pytest.mark.parametrize(
    ("is_asked", "device", "expected"), [(True, "cuda", [3, 6]), (True, "cpu", []), (False, "cuda", [])]
)
def test_memory_statistics_are_read_at_the_steps_that_are_logged(is_asked, device, expected, monkeypatch):
    monkeypatch.setattr(training, "get_memory_stats", lambda device: {"peak_memory_active": 1.0})
    settings = {"debug_checks": False, "log_every_n_steps": 3, "log_peak_memory_stats": is_asked}
    checks = StepChecks(OmegaConf.create(settings))
    checks.start(SimpleNamespace(parallel=SimpleNamespace(device=torch.device(device))))
    assert [step for step in range(1, 8) if checks.after_step(SimpleNamespace(step=step))] == expected


def test_state_of_hooks_is_collected_in_the_configs_order(folder, base_folder, rows_file, tmp_path):
    """A set would have another order in each process, and state_dict may hold a collective."""
    names = ["alpha", "beta", "mu", "zeta"]  # sorted, as YAML writes them
    hooks = {name: {"_component_": "own_hooks.Recorder"} for name in names}
    run = run_here(tmp_path / "a", make_config(base_folder, rows_file, tmp_path / "run", hooks=hooks))
    assert run.returncode == 0, run.output
    (state,) = run.folder.glob("checkpoints/step_*/state.json")
    assert list(json.loads(state.read_text())["hooks"]) == names


def test_a_signals_stop_is_not_replaced_by_a_hooks():
    state = TrainState(Parallel(torch.device("cpu")))
    state.request_stop("a hook")
    state.request_stop("a signal", is_finished=False, is_requeued=True)
    state.request_stop("another hook")
    state.agree()
    assert state.stop == Stop("a signal", is_finished=False, is_requeued=True)


AGREE = """
    import time
    from finch.distributed import parallel
    from finch.training.checkpointer import TrainState

    place = parallel.start(torch.device("cpu"), shard=True)
    state, seen, marker = TrainState(place), [], folder / "rank_0_goes_on"

    def agree():
        state.agree()
        seen.append([state.is_save_due, state.stop.reason if state.stop else None])
        if state.is_save_due:
            state.saved()

    if place.rank == 0:
        agree()  # of step 1: waits for no other rank, which goes on only now
        marker.write_text("")
    else:
        while not marker.exists():
            time.sleep(0.01)
        state.request_save()
        agree()
    agree()
    agree()
    state.request_save(by_all=True)  # of step 4
    agree()
    if place.rank == 1:
        state.request_save()  # of step 5, read with what all ask after step 6
    agree()
    state.request_save(by_all=True)
    agree()
    agree()
    state.waits = True
    if place.rank == 1:
        state.request_save()
    agree()
    state.waits = False
    if place.rank == 1:
        state.request_stop("a signal", is_finished=False)
    agree()
    state.is_epoch_end = True
    agree()
    tell(seen)
    parallel.stop()
"""


def test_requests_of_one_rank_count_after_the_next_step_and_nobody_waits_for_them(tmp_path):
    saves = [False, True, False, True, False, True, False, True, False, False]
    expected = [[is_due, None] for is_due in saves[:-1]] + [[False, "a signal"]]
    assert on_ranks(2, AGREE, tmp_path, timeout=60) == [expected] * 2
