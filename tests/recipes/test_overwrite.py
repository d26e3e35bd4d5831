"""overwrite=True: the old run stays until the new one starts its first step, and then nothing of it is left."""

import collections
import hashlib
import shutil
import sys

import pytest
from helpers.runs import Broken, fail_while_loading, make_config, run_here

from finch import run_files

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


def disk_logger(folder, **arguments):
    component = "torchtune.training.metric_logging.DiskLogger"
    return {"_component_": component, "log_dir": str(folder / run_files.LOGS), **arguments}


@pytest.fixture
def config(tmp_path, base_folder, rows_file):
    run = tmp_path / "run"
    config = make_config(
        base_folder, rows_file, run, epochs=2, max_steps_per_epoch=2, metric_logger=disk_logger(run, filename="old.txt")
    )
    config["dataset_validation"] = {**config["dataset"], "split": "train[:7]"}
    return config


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
    fail_while_loading(monkeypatch, MemoryError("weights"))
    (old_run / run_files.REQUEUE).touch()
    before = contents(old_run)
    config["metric_logger"] = disk_logger(old_run, filename="new.txt")
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
    (old_run / "notes.txt").touch()
    config = {**config, "epochs": 1, "dataset_validation": None, "metric_logger": disk_logger(old_run)}
    new = run_here(tmp_path, {key: value for key, value in config.items() if value is not None}, OVERWRITE)
    assert new.returncode == 0, new.output
    (log,) = (old_run / run_files.LOGS).iterdir()
    assert log.name.startswith("log_")
    assert len(log.read_text().splitlines()) == 2
    left = {path.name for path in old_run.iterdir()} - {run_files.LOSS_FIGURE, "torchtune_config.yaml"}
    assert left == {
        *(run_files.CONFIG, run_files.METRICS, run_files.CHECKPOINTS, run_files.REFERENCE_LOSSES),
        *(run_files.LOGS, run_files.LOCK, "epoch_0", "notes.txt"),
    }
    assert [path.name for path in (old_run / run_files.CHECKPOINTS).iterdir()] == ["step_2"]
    assert new.column("step") == [1, 2]


def test_log_that_the_new_run_appends_to_is_emptied(tmp_path, config, old_run):
    log = old_run / run_files.LOGS / "old.txt"
    lines = log.read_text().splitlines()
    assert run_here(tmp_path, config, OVERWRITE).returncode == 0
    assert len(log.read_text().splitlines()) == len(lines)


@pytest.mark.parametrize("override", [OVERWRITE, "resume_from_checkpoint=auto"])
def test_interrupted_removal_is_no_obstacle(override, tmp_path, config, old_run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: (_ for _ in ()).throw(Broken))
        with pytest.raises(Broken):
            run_here(tmp_path, config, OVERWRITE)
    assert (old_run / run_files.METRICS).exists()
    again = run_here(tmp_path, config, override, "max_steps_per_epoch=1")
    assert again.returncode == 0, again.output
    assert "resumed" not in again.output
    assert again.column("step") == [1, 2]


def test_disk_without_room_for_an_epoch_is_rejected(tmp_path, config, old_run, base_folder, monkeypatch):
    usage = collections.namedtuple("usage", "free")
    size = (base_folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(size // 2))
    before = contents(old_run)
    new_folder = run_here(tmp_path, config, f"output_dir={tmp_path / 'new'}")
    assert (
        f"output_dir={tmp_path / 'new'} has {size // 2:,} bytes of free disk, the weights of one epoch need"
        in new_folder.error()
    )
    assert not (tmp_path / "new").exists()
    assert contents(old_run) == before
    replaced = run_here(tmp_path, config, OVERWRITE, "export_dtype=fp64")
    assert replaced.returncode == 0, replaced.output  # the old run's files make room
