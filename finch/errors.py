"""A user's mistake, told in one sentence and without a traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ERROR_FILE = "FINCH_ERROR_FILE"
"""Name of the environment variable with the file that a user's mistake is also written to."""


class UserError(ValueError):
    """Something the user can mend: the message names key, value and remedy in one sentence."""


class WriteFailed(OSError):
    """Files could not be written, most often for want of room; what was there before is as it was."""


# What gloo and NCCL say when another process of the group has gone; that process has its own, better message.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "connection was closed",
    "remote process exited",
    "Broken pipe",
)
_TIMED_OUT = "Timed out waiting"  # gloo's; NCCL ends the process itself


def report_user_errors(main: Callable[..., Any]) -> Callable[..., None]:
    """Decorates a program's main function: a UserError becomes one line on stderr and exit code 1.

    Under torchrun the first process to leave ends all others. Rank 0 tells at once; another rank waits a moment
    before it tells, since most mistakes show on every rank and one sentence is enough; and a rank that merely lost a
    peer waits for the peer's own error.
    """

    @functools.wraps(main)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        try:
            main(*args, **kwargs)
        except UserError as error:
            # A loader's worker hands on its own traceback as the message, which ends in the sentence.
            sentence = str(error).rpartition("UserError: ")[2].strip()
            _leave_sentence(sentence)
            if os.environ.get("RANK", "0") != "0":
                time.sleep(10)
            print(f"\nfinch: error: {sentence}", file=sys.stderr, flush=True)  # a progress bar may stand on the line
            _leave(1)
        except KeyboardInterrupt:
            print("\nfinch: interrupted", file=sys.stderr, flush=True)
            _leave(130)
        except Exception as error:
            if "LOCAL_RANK" not in os.environ:
                raise
            if isinstance(error, RuntimeError) and _TIMED_OUT in str(error):
                traceback.print_exc()
                print(
                    f"\nfinch: error: rank {os.environ.get('RANK')} has waited for another rank as long as distributed_timeout allows; the stacks that "
                    "each rank prints before that show where it is stuck",
                    file=sys.stderr,
                    flush=True,
                )
                _leave(1)
            if not (isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST_PEER)):
                traceback.print_exc()
                _leave(1)
            time.sleep(5)
            print(
                f"\nfinch: rank {os.environ.get('RANK')} stopped because another rank did; its error stands above",
                file=sys.stderr,
                flush=True,
            )
            _leave(1)

    return wrapper


def _leave_sentence(sentence: str) -> None:
    """For whoever started the ranks: a mistake is not mended by starting them again, and the sentence goes into its log."""
    if file := os.environ.get(ERROR_FILE):
        with contextlib.suppress(OSError), Path(file).open("x", encoding="utf-8") as opened:  # one rank's is enough
            opened.write(sentence + "\n")


def exit_without_teardown() -> None:
    """Ends a rank whose work is done, without taking the interpreter apart; nothing to do for a process of its own.

    While the interpreter ends, a thread of gloo's now and then aborts the process ("terminate called without an active
    exception"), and torchrun would report a finished run as failed.
    """
    if "LOCAL_RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _leave(code: int) -> None:
    """Ends the process; with a live process group at once, since tearing it down could wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        os._exit(code)
    sys.exit(code)
