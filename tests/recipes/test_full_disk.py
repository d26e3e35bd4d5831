"""A full disk: earlier files stay, the run warns and continues; a folder that cannot be written fails early."""

import errno
import os

import pytest
import torch.distributed.checkpoint as dcp
from helpers.runs import LORA, LORA_MODEL, assert_same_run, run_here, tune_run

from finch.base.errors import WriteFailed
from finch.models import lora
from finch.training.run import RunLock
from finch.weights.huggingface import HuggingFaceFolder
from finch.weights.peft import PeftFolder

pytestmark = pytest.mark.slow


def raise_disk_full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_full_disk_at_a_save_keeps_the_last_checkpoint(tmp_path, tiny, trained, monkeypatch):
    uninterrupted = trained(tiny())
    save, folders = dcp.save, []

    def fails_at_six(*args, **kwargs):
        if kwargs["checkpoint_id"].endswith("step_6.partial"):
            folders.append(sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()))
            raise_disk_full()
        return save(*args, **kwargs)

    monkeypatch.setattr(dcp, "save", fails_at_six)
    run = run_here(tmp_path, tiny(checkpoint={"every_n_steps": 3}))
    assert folders == [["step_3", "step_6.partial"]]
    assert "the state of step 6 could not be saved (No space left on device); " in run.output
    assert "checkpoints/step_3 stays, and the next save tries again" in run.output
    assert "saved the state of step 9 in" in run.output
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["step_11"]
    assert_same_run(run, uninterrupted)


@pytest.mark.parametrize("epoch", [0, 1])
def test_full_disk_at_an_export_continues_or_fails_at_the_end(epoch, tmp_path, tiny, trained, monkeypatch):
    config = tiny(epochs=2, is_validated=True)
    uninterrupted = trained(config)
    write = HuggingFaceFolder._write_into

    def fails(folder, target, like, parts):
        if target.name == f"epoch_{epoch}.partial":
            (target / "part-1").write_bytes(b"half")
            next(parts)
            raise_disk_full()
        write(folder, target, like, parts)

    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceFolder, "_write_into", fails)
        run = run_here(tmp_path / "r", config)
    assert f"epoch_{epoch} could not be written ([Errno 28] No space left on device)" in run.output
    assert not list(run.folder.glob("*.partial"))
    assert run.column("loss") == uninterrupted.column("loss")
    if epoch == 0:
        assert run.returncode == 0
        assert (run.folder / "best").readlink().name == "epoch_1"
    else:
        assert "has no room for the last epoch's folder; make room" in run.error()
        resumed = run_here(tmp_path / "r", config, "resume_from_checkpoint=auto")
        assert "resumed from step 22 of" in resumed.output
        assert_same_run(resumed, uninterrupted)


def test_full_disk_at_an_adapter_keeps_no_rank_waiting(tmp_path, tiny, monkeypatch):
    """The merged model is gathered on every rank all the same, as those do that write nothing."""
    write, gathered = PeftFolder.write, []

    def fails_once(*args, **kwargs):
        if not gathered:
            raise WriteFailed("No space left on device")
        write(*args, **kwargs)

    merged = lora.merged
    monkeypatch.setattr(PeftFolder, "write", fails_once)
    monkeypatch.setattr("finch.training.loaded_model.lora.merged", lambda *args: gathered.append(1) or merged(*args))
    run = run_here(tmp_path, tiny(epochs=2, model=LORA_MODEL), recipe=LORA)
    assert run.returncode == 0, run.output
    assert "epoch_0 could not be written (No space left on device)" in run.output
    assert len(gathered) == 2
    assert (run.folder / "epoch_1_adapter").is_dir()


def test_unwritable_output_dir_fails_early(tiny, tmp_path, monkeypatch):
    """Without permissions, which do not stop root."""
    (tmp_path / "file").write_text("")
    run = run_here(tmp_path, tiny(), f"output_dir={tmp_path}/file/run")
    assert "cannot be written (Not a directory); give another folder" in run.error()
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(RunLock, "acquire", lambda lock: raise_disk_full())
    run = run_here(tmp_path, tiny())
    assert "cannot be written (No space left on device); give another folder" in run.error()


def test_file_size_limit_stops_the_export_on_two_ranks(tmp_path, tiny, base_folder):
    """Files may have one and a half times the model's size: a rank's state with SGD fits, the model in fp64 does not."""
    size = (base_folder / "model.safetensors").stat().st_size
    config = tiny(batch_size=2, epochs=2, export_dtype="fp64")
    config["optimizer"] = {"_component_": "torch.optim.SGD", "lr": 1e-2}
    limited = tune_run(tmp_path, config, ranks=2, before=("prlimit", f"--fsize={size * 3 // 2}"))
    assert limited.returncode != 0
    assert "epoch_0 could not be written (" in limited.output
    assert "has no room for the last epoch's folder; make room" in limited.error()
    assert not list(limited.folder.glob("epoch_*"))
    again = tune_run(tmp_path, config, "resume_from_checkpoint=True", ranks=2)
    assert "resumed from step 22 of" in again.output
    assert again.returncode == 0, again.output[-2000:]
    assert len(again.column("loss")) == 22
    assert [path.name for path in again.folder.glob("epoch_*")] == ["epoch_1"]
