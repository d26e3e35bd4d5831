"""RUN/, the folder of a run: who holds it, what a fresh start removes, and the two files that point: REQUEUE and best."""

from __future__ import annotations

import contextlib
import shutil
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
        path: of the folder, which need not exist.
        is_writer: whether this rank writes; it alone holds the lock.
    """

    def __init__(self, path: Path, *, is_writer: bool) -> None:
        self.path, self._is_writer = path, is_writer
        self._lock = RunLock(path)

    def hold(self) -> None:
        """Locks the folder, which must exist.

        Raises:
            UserError: another run holds it, or it cannot be written.
        """
        if self._is_writer:
            with self._or_user_error():
                self._lock.hold()

    def start(self, config: Any, *, afresh: bool, resumed_from: Path | None) -> None:
        """Makes the folder this run's.

        Args:
            config: written to config.yaml.
            afresh: remove what an earlier run has left.
            resumed_from: the checkpoint to go on from; what came after it is set aside.

        Raises:
            UserError: another run holds the folder, or it cannot be written.
        """
        if not self._is_writer:
            return
        with self._or_user_error():
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.hold()
            self._lock.sign()
            (self.path / run_files.REQUEUE).unlink(missing_ok=True)
            if afresh:
                named = [self.path / name for name in (run_files.METRICS, run_files.BEST, run_files.CHECKPOINTS)]
                for path in (*named, *self.path.glob("epoch_*")):
                    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
            if resumed_from is not None:
                checkpoint.archive_newer(self.path, resumed_from)
            OmegaConf.save(config, self.path / run_files.CONFIG)

    def mark_requeue(self) -> None:
        """Leaves the file that says: not done, start me again."""
        if self._is_writer:
            with contextlib.suppress(OSError):
                (self.path / run_files.REQUEUE).touch()

    def link_best(self, name: str) -> None:
        """Makes ``best`` a relative link to the folder ``name``, replacing it in one step."""
        if self._is_writer:
            with files.atomic_file(self.path / run_files.BEST) as link:
                link.symlink_to(name)

    def release(self) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def _or_user_error(self) -> Any:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"output_dir={self.path} cannot be written ({error.strerror}); give another folder"
            ) from error
