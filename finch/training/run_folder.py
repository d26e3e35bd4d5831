"""RUN/, the folder of a run: its lock, when an older run in it is removed, the marker REQUEUE and the links to its models."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from finch import files, run_files
from finch.checkpoint import manifest
from finch.checkpoint import reader as checkpoint
from finch.errors import UserError
from finch.training.run_lock import RunLock


class RunFolder:
    """The folder is locked while the run is set up, and becomes this run's in ``begin``: a run that fails before its first step
    leaves everything as it was.

    Args:
        path: the folder, which need not exist.
        is_writer: whether this rank writes; only that one holds the lock.
        replace: remove what an earlier run has written, in ``begin``.
    """

    def __init__(self, path: Path, *, is_writer: bool, replace: bool = False) -> None:
        self.path, self._is_writer, self._replace = path, is_writer, replace
        self._lock = RunLock(path)
        self._old_logs: dict[Path, tuple[int, int]] = {}

    def lock_existing(self) -> None:
        """Locks the folder if it exists; call it before a metric logger is built, whose files are not an earlier run's.

        Raises:
            UserError: another run holds it, or it cannot be written.
        """
        if self._is_writer and self.path.is_dir():
            with self._os_error_as_user_error():
                self._lock.acquire()
                if self._replace:
                    self._old_logs = {path: _version(path) for path in _files_in(self.path / run_files.LOGS)}

    def create(self) -> None:
        """Creates and locks the folder; what is in it stays.

        Raises:
            UserError: another run holds the folder, or it cannot be written.
        """
        if self._is_writer:
            with self._os_error_as_user_error():
                self.path.mkdir(parents=True, exist_ok=True)
                self._lock.acquire()
                if not self._replace:
                    (self.path / run_files.REQUEUE).unlink(missing_ok=True)

    def begin(self, config: Any, *, resumed_from: Path | None) -> None:
        """Makes the folder this run's; called when the first step starts.

        Args:
            config: written to config.yaml.
            resumed_from: the checkpoint that the run resumes from; later ones are archived.

        Raises:
            UserError: a file cannot be removed or written.
        """
        if not self._is_writer:
            return
        with self._os_error_as_user_error():
            if self._replace:
                self._remove_old_run()
            if resumed_from is not None:
                checkpoint.archive_newer(self.path, resumed_from)
            with files.atomic_file(self.path / run_files.CONFIG) as partial:
                OmegaConf.save(config, partial)

    def replaced_bytes(self) -> int:
        """Bytes that ``begin`` will free."""
        paths = [] if not self._replace else [path for each in self._old_outputs() for path in _files_in(each)]
        return sum(path.lstat().st_size for path in paths)

    def mark_requeue(self) -> None:
        """Creates REQUEUE: the run is not finished and should be started again."""
        if self._is_writer:
            with contextlib.suppress(OSError):
                (self.path / run_files.REQUEUE).touch()

    def link(self, link: str, name: str) -> None:
        """Makes ``link`` (``best``, ``within_budget``) a relative link to the folder ``name``, replaced in one step."""
        if self._is_writer:
            with files.atomic_file(self.path / link) as partial:
                partial.symlink_to(name)

    def unlock(self) -> None:
        self._lock.release()

    def _old_outputs(self) -> list[Path]:
        """In the order of their removal, which may be interrupted: without checkpoints nothing resumes the old run, and as long as
        metrics.jsonl is there the folder counts as a run's."""
        names = (run_files.REQUEUE, run_files.CHECKPOINTS, run_files.BEST, run_files.WITHIN_BUDGET)
        models = [*self.path.glob("epoch_*"), *self.path.glob(f"{run_files.WITHIN_BUDGET}_step_*")]
        last = (run_files.LOSS_FIGURE, run_files.METRICS)
        return [self.path / name for name in names] + models + [self.path / name for name in last]

    def _remove_old_run(self) -> None:
        for path in (self.path / run_files.CHECKPOINTS).glob(f"*/{manifest.FILE_NAME}"):
            path.unlink()  # a checkpoint that is half removed must not look damaged
        self._remove_old_logs()
        for path in self._old_outputs():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)

    def _remove_old_logs(self) -> None:
        """Those that are as they were before this run's metric logger was built; one that the logger appends to is emptied."""
        is_open = _open_files()
        for path, version in self._old_logs.items():
            if not os.path.lexists(path) or _version(path) != version:
                continue
            if not path.is_symlink() and (path.stat().st_dev, path.stat().st_ino) in is_open:
                os.truncate(path, 0)
            else:
                path.unlink()
        for folder in sorted({path.parent for path in self._old_logs}, reverse=True):
            with contextlib.suppress(OSError):  # not empty
                folder.rmdir()

    @contextlib.contextmanager
    def _os_error_as_user_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"output_dir={self.path} cannot be written ({error.strerror}); give another folder"
            ) from error


def _files_in(path: Path) -> list[Path]:
    """The files and links below a folder; a file or link itself."""
    if path.is_dir() and not path.is_symlink():
        return [each for each in path.rglob("*") if each.is_symlink() or each.is_file()]
    return [path] if os.path.lexists(path) else []


def _version(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_ino, status.st_mtime_ns


def _open_files() -> set[tuple[int, int]]:
    """(device, inode) of the files that this process has open; empty where the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own
                status = os.fstat(int(descriptor))
                found.add((status.st_dev, status.st_ino))
    return found
