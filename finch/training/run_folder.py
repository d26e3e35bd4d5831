"""RUN/, the folder of a run: its lock, what a run from scratch removes, the marker REQUEUE and the link ``best``."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from finch import files, run_files
from finch.checkpoint import reader as checkpoint
from finch.errors import UserError
from finch.training.run_lock import RunLock


class RunFolder:
    """
    Args:
        path: the folder, which need not exist.
        is_writer: whether this rank writes; only that one holds the lock.
    """

    def __init__(self, path: Path, *, is_writer: bool) -> None:
        self.path, self._is_writer = path, is_writer
        self._lock = RunLock(path)

    def lock(self) -> None:
        """Locks the folder, which must exist.

        Raises:
            UserError: another run holds it, or it cannot be written.
        """
        if self._is_writer:
            with self._os_error_as_user_error():
                self._lock.acquire()

    def prepare(self, config: Any, *, from_scratch: bool, resumed_from: Path | None) -> None:
        """Creates and locks the folder and makes it this run's.

        Args:
            config: written to config.yaml.
            from_scratch: remove what an earlier run has written.
            resumed_from: the checkpoint that the run resumes from; later ones are archived.

        Raises:
            UserError: another run holds the folder, or it cannot be written.
        """
        if not self._is_writer:
            return
        with self._os_error_as_user_error():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            (self.path / run_files.REQUEUE).unlink(missing_ok=True)
            if from_scratch:
                outputs = [self.path / name for name in (run_files.METRICS, run_files.BEST, run_files.CHECKPOINTS)]
                for path in (*outputs, *self.path.glob("epoch_*")):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            if resumed_from is not None:
                checkpoint.archive_newer(self.path, resumed_from)
            OmegaConf.save(config, self.path / run_files.CONFIG)

    def mark_requeue(self) -> None:
        """Creates REQUEUE: the run is not finished and should be started again."""
        if self._is_writer:
            with contextlib.suppress(OSError):
                (self.path / run_files.REQUEUE).touch()

    def link_best(self, name: str) -> None:
        """Makes ``best`` a relative link to the folder ``name``, replaced in one step."""
        if self._is_writer:
            with files.atomic_file(self.path / run_files.BEST) as link:
                link.symlink_to(name)

    def unlock(self) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def _os_error_as_user_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"output_dir={self.path} cannot be written ({error.strerror}); give another folder"
            ) from error
