"""save_best_only: one folder, and no state of a short run; a killed one resumes exactly; what is said of the disk. Through the recipe, on the CPU."""

import re
from types import SimpleNamespace

import pytest
from helpers.runs import assert_same_weights, finished, llama_args, run_broken, run_here, script_validation

from benchmarks.tiny_job import make_base
from finch.base import run_files, status
from finch.base.files import replace_text
from finch.study.report.runs import read_runs
from finch.study.sweep.job import is_trained

LOSSES = {2: 3.0, 4: 2.0, 6: 2.5, 8: 1.0}
UNITS = {"kB": 1e3, "MB": 1e6, "GB": 1e9}


@pytest.fixture
def config(tiny):
    return tiny(True, epochs=3, max_steps_per_epoch=2, save_best_only=True)


def names(run, pattern="epoch_*"):
    return sorted(path.name for path in run.folder.glob(pattern))


def has_weights(run):
    """The model's alone are 78 kB."""
    return sum(path.stat().st_size for path in run.folder.glob("checkpoints/*/*.distcp")) > 1000


def assert_same_best(run, straight):
    assert names(run) == [(straight.folder / "best").readlink().name] == [(run.folder / "best").readlink().name]
    assert_same_weights(run.folder / "best", straight.folder / "best")
    assert run.columns("step", "loss", "lr") == straight.columns("step", "loss", "lr")
    assert run.metrics(validation=True) == straight.metrics(validation=True)


def test_short_run_keeps_its_best_model_alone(config, tmp_path, monkeypatch):
    """What tells a later start that it has ended holds no weights."""
    script_validation(monkeypatch, LOSSES)
    straight = finished(tmp_path / "a", config, "save_best_only=False")
    run = finished(tmp_path / "b", config)
    assert names(straight) == ["epoch_0", "epoch_1", "epoch_2"]
    assert_same_best(run, straight)
    assert not has_weights(run)
    assert is_trained(run.folder, SimpleNamespace(epochs=3, forgetting_budget=None, early_stopping=None))
    [read] = read_runs([run.folder])
    assert (read.finished_epochs, read.num_rows) == (3, 41)
    again = finished(tmp_path / "b", config, "resume_from_checkpoint=auto")
    assert "nothing to do: 3 epochs have ended; it has left no weights to continue from" in again.output
    assert_same_best(again, straight)
    more = run_here(
        tmp_path / "b", {**config, "output_dir": str(run.folder)}, "resume_from_checkpoint=auto", "epochs=4"
    )
    assert "epochs=4: " in more.error()
    assert "ended after 3, and it has left no weights to continue from; overwrite=True starts anew" in more.error()


def test_killed_run_resumes_exactly_and_goes_on(config, tmp_path, monkeypatch):
    """The state is of step 3, whose best epoch the next one had replaced before the kill."""
    script_validation(monkeypatch, LOSSES)
    straight = finished(tmp_path / "a", config, "save_best_only=False", "epochs=4")
    config |= {"output_dir": str(tmp_path / "run"), "checkpoint": {"every_n_steps": 3}}
    run_broken(tmp_path, config, monkeypatch, 4)
    assert (tmp_path / "run" / "best").readlink().name == "epoch_1"
    run = finished(tmp_path, config, "resume_from_checkpoint=True")
    assert "resumed from step 3" in run.output
    assert names(run) == ["epoch_1"]
    assert (names(run, "checkpoints/*"), has_weights(run)) == (["step_6"], True)
    assert_same_weights(run.folder / "best", straight.folder / "epoch_1")
    assert_same_best(finished(tmp_path, config, "resume_from_checkpoint=True", "epochs=4"), straight)


@pytest.mark.parametrize("every", [None, 1])
def test_short_run_that_has_stopped_early_stays_so(every, config, tmp_path, monkeypatch):
    script_validation(monkeypatch, {**LOSSES, 1: 3.5, 3: 2.2, 5: 2.4})
    config |= {"early_stopping": {"patience": 1}, "validate_every_n_steps": every}
    for words in ([], ["resume_from_checkpoint=True"]):
        run = finished(tmp_path, config, *words)
        assert "to continue;" not in run.output
        ended = status.read(run.folder / run_files.STATUS)
        assert (ended["is_finished"], ended["error"]) == (True, None)
        assert ended["stopped_by"].startswith("early_stopping: validation loss no better in 1 readings")
        # As a kill after the last step leaves it, such as while the average is written.
        replace_text(run.folder / run_files.STATUS, '{"phase": "steps", "error": "lost"}')
        assert run.column("step")[-1] == (5 if every else 6)
        assert run_files.chosen_model(run.folder).readlink().name == "epoch_1"
        assert names(run) == ["epoch_1"]
        assert not has_weights(run)
    assert "nothing to do: this run was stopped by early_stopping: " in run.output


def test_two_ranks(config, tmp_path):
    config |= {"batch_size": 2}
    run = finished(tmp_path, config, ranks=2)
    assert (len(names(run)), has_weights(run)) == (1, False)
    again = finished(tmp_path, config, "resume_from_checkpoint=True", ranks=2)
    assert "nothing to do: 3 epochs have ended" in again.output


@pytest.mark.parametrize("is_light", [True, False])
def test_disk_use_is_as_was_said(is_light, tiny, tmp_path):
    """Of a model next to which the log and the figure are small."""
    size = {"embed_dim": 256, "intermediate_dim": 512}
    make_base(tmp_path / "base", **size)
    config = tiny(True, epochs=2, max_steps_per_epoch=1, save_best_only=is_light)
    config["model"] |= llama_args(**size)
    config["checkpointer"]["checkpoint_dir"] = str(tmp_path / "base")
    run = finished(tmp_path, config)
    found = re.search(
        r"disk: the weights.*? take (\S+) (\w+), (once one is saved )?a state to resume from (\S+) (\w+);", run.output
    )
    said = float(found[1]) * UNITS[found[2]] + (0 if found[3] else float(found[4]) * UNITS[found[5]])
    assert bool(found[3]) == is_light
    assert sum(
        path.lstat().st_size for path in run.folder.rglob("*") if path.is_file() and not path.is_symlink()
    ) == pytest.approx(said, rel=0.1)
