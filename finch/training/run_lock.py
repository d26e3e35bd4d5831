"""A run holds a lock on its output folder, so that two never write into one.

The lock is the operating system's (flock) and goes with its holder, however that ends; on NFS it holds across machines. The
file's content tells people who the holder is.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from pathlib import Path

from finch import run_files
from finch.errors import UserError

PATIENCE_S = 5.0  # a holder that has been killed may take a moment to be gone
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class RunLock:
    """
    Args:
        run: the run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / run_files.LOCK
        self._descriptor: int | None = None

    def check(self) -> None:
        """
        Raises:
            UserError: another run holds the folder; says who.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY)
        except OSError:  # there is no lock, or no right to read it: `hold` will tell
            return
        try:
            self._lock(descriptor, fcntl.LOCK_SH)  # several ranks may look at a time
        finally:
            os.close(descriptor)

    def hold(self) -> None:
        """Locks the folder, which must exist, until ``release`` or the end of the process.

        Raises:
            UserError: another run holds it; says who.
            OSError: the folder cannot be written.
        """
        if self._descriptor is not None:
            return
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor

    def sign(self) -> None:
        """Writes who holds the lock."""
        assert self._descriptor is not None
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, (json.dumps(holder) + "\n").encode(), 0)

    def release(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # closing would leave it to forked processes
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int, kind: int) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UserError(
                        f"output_dir={self._path.parent} is in use by {self._holder()}; wait for it to end, or give another output_dir"
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
                warnings.warn(
                    f"{self._path.parent} lies on a file system without locks: nothing keeps a second run out",
                    stacklevel=2,
                )
                return

    def _holder(self) -> str:
        try:
            holder = json.loads(self._path.read_text(encoding="utf-8"))
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (OSError, ValueError, KeyError):
            return "another process"
