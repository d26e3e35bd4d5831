"""One run per output folder: a run locks RUN/.lock, so that two never write into one folder.

The lock is the operating system's (flock, through filelock) and is released when its holder ends, however that happens; on NFS
it holds across machines. The file's content names the holder, for the error message.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import warnings
from pathlib import Path

from filelock import FileLock, Timeout

from finch import run_files
from finch.errors import UserError

ACQUIRE_TIMEOUT_S = 5.0  # a holder that has been killed may take a moment to exit
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class RunLock:
    """
    Args:
        run: the run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._path = run / run_files.LOCK
        # Not filelock's lock file without flock: it would outlive a killed holder.
        self._lock = FileLock(self._path, timeout=ACQUIRE_TIMEOUT_S, fallback_to_soft=False)

    def check(self) -> None:
        """Checks that no run holds the folder; creates nothing.

        Raises:
            UserError: another run holds the folder; names it.
        """
        with contextlib.suppress(OSError):  # the file cannot be opened: `acquire` reports that
            if self._path.exists():
                self._acquire()
                self.release()

    def acquire(self) -> None:
        """Locks the folder, which must exist, until ``release`` or the end of the process.

        Raises:
            UserError: another run holds the folder; names it.
            OSError: the folder cannot be written.
        """
        self._acquire()
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S %z")}
        self._path.write_text(json.dumps(holder) + "\n", encoding="utf-8")

    def release(self) -> None:
        self._lock.release(force=True)  # however often it was acquired

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except Timeout:
            raise UserError(
                f"output_dir={self._path.parent} is in use by {self._holder()}; wait for it to end, or give another output_dir"
            ) from None
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            warnings.warn(
                f"{self._path.parent} is on a file system without locks: a second run could write into it", stacklevel=2
            )

    def _holder(self) -> str:
        try:
            holder = json.loads(self._path.read_text(encoding="utf-8"))
            return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        except (OSError, ValueError, KeyError):
            return "another process"
