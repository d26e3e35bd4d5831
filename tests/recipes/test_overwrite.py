"""overwrite=True: the old run stays until the new one starts its first step, and then nothing of it is left."""

import hashlib
import shutil
import sys
from types import SimpleNamespace

import pytest
from helpers.runs import Broken, disk_logger, finished, run_here

from finch.base import run_files

OVERWRITE = "overwrite=True"
WANDB = "metric_logger=torchtune.training.metric_logging.WandBLogger"


def contents(folder):
    """A digest of each file of a run but its lock, and the target of each link."""
    return {
        path.relative_to(folder): path.readlink()
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink()) and path.name != run_files.LOCK
    }


@pytest.fixture
def config(tmp_path, tiny):
    logger = disk_logger(tmp_path / "run" / run_files.LOGS, filename="old.txt")
    return tiny(epochs=2, max_steps_per_epoch=2, metric_logger=logger, is_validated=True)


@pytest.fixture
def old_run(tmp_path, config, trained):
    folder = shutil.copytree(trained(config).folder, tmp_path / "run", symlinks=True)
    assert (folder / "best").exists()
    return folder


def test_missing_logger_package_leaves_the_old_run(tmp_path, config, old_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = contents(old_run)
    failed = run_here(tmp_path, config, OVERWRITE, "optimizer.lr=1e-3", WANDB, "metric_logger.log_dir=null")
    assert "metric_logger: " in failed.error()
    assert "wandb" in failed.error()
    assert "parameters loaded" not in failed.output
    assert contents(old_run) == before


def test_failure_while_loading_weights_leaves_the_old_run(tmp_path, config, old_run, monkeypatch):

    def fail(*_):
        raise MemoryError("weights")

    monkeypatch.setattr("finch.training.loaded_model.LoadedModel.load_pretrained", fail)
    (old_run / run_files.REQUEUE).touch()
    before = contents(old_run)
    config["metric_logger"]["filename"] = "new.txt"
    with pytest.raises(MemoryError, match="weights"):
        run_here(tmp_path, config, OVERWRITE, "optimizer.lr=1e-3")
    after = contents(old_run)
    del after[(old_run / run_files.LOGS / "new.txt").relative_to(old_run)]
    assert after == before


def test_run_that_starts_from_the_old_one_is_rejected(tmp_path, config, old_run):
    before = contents(old_run)
    failed = run_here(tmp_path, config, OVERWRITE, f"checkpointer.checkpoint_dir={old_run / 'best'}")
    assert "overwrite=True would remove checkpointer.checkpoint_dir=" in failed.error()
    assert contents(old_run) == before


def test_nothing_of_the_old_run_is_left(tmp_path, config, old_run):
    (old_run / run_files.LOGS / "wandb").mkdir()
    (old_run / run_files.LOGS / "wandb" / "old").write_text("")
    (old_run / run_files.REQUEUE).touch()
    (old_run / run_files.REFERENCE_LOSSES).touch()
    (old_run / run_files.EVALUATION).mkdir()
    (old_run / run_files.EVALUATION / "forgetting.json").touch()
    (old_run / "notes.txt").touch()
    new = finished(tmp_path, config, OVERWRITE, "epochs=1", "~dataset_validation", "~metric_logger.filename")
    (log,) = (old_run / run_files.LOGS).iterdir()
    assert log.name.startswith("log_")
    assert len(log.read_text().splitlines()) == 2
    left = {path.name for path in old_run.iterdir()} - {"torchtune_config.yaml"}
    assert left == {
        *(run_files.CONFIG, run_files.METRICS, run_files.CHECKPOINTS, run_files.REFERENCE_LOSSES),
        *(run_files.LOGS, run_files.LOCK, run_files.STATUS, "epoch_0", "notes.txt"),
    }
    assert [path.name for path in (old_run / run_files.CHECKPOINTS).iterdir()] == ["step_2"]
    assert new.column("step") == [1, 2]


def test_log_that_the_new_run_appends_to_is_emptied(tmp_path, config, old_run):
    log = old_run / run_files.LOGS / "old.txt"
    lines = log.read_text().splitlines()
    finished(tmp_path, config, OVERWRITE)
    assert len(log.read_text().splitlines()) == len(lines)


@pytest.mark.parametrize("override", [OVERWRITE, "resume_from_checkpoint=auto"])
def test_interrupted_removal_is_no_obstacle(override, tmp_path, config, old_run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: (_ for _ in ()).throw(Broken))
        with pytest.raises(Broken):
            run_here(tmp_path, config, OVERWRITE)
    assert (old_run / run_files.METRICS).exists()
    again = finished(tmp_path, config, override, "max_steps_per_epoch=1")
    assert "resumed" not in again.output
    assert again.column("step") == [1, 2]


def test_disk_without_room_for_an_epoch_is_rejected(tmp_path, config, old_run, base_folder, monkeypatch):
    free, new = (base_folder / "model.safetensors").stat().st_size // 2, tmp_path / "new"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    error = run_here(tmp_path, config, f"output_dir={new}").error()
    assert f"output_dir={new} has {free:,} bytes of free disk, the weights of one epoch need" in error
    assert not new.exists()
    finished(tmp_path, config, OVERWRITE, "export_dtype=fp64")  # the old run's files make room
