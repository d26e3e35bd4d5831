"""A user's mistake is one line on stderr, without a traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from finch.base import status

ERROR_FILE = "FINCH_ERROR_FILE"
"""Environment variable: a file that the message of a UserError is also written to."""
HANG = 124
"""Exit code of a rank that has waited for longer than ``distributed_timeout``; timeout(1) has the same."""

_MAX_LINE, _MAX_WORD = 275, 80


class UserError(ValueError):
    """A mistake that the user can fix. The message is one line: key and value, what is wrong, what to do.

    Values may come from untrusted files: control characters are escaped, and of a line that is too long the middle of its long words, then
    its own, is left out.
    """

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))

    def under(self, key: str, **names: str) -> UserError:
        """The same mistake of a block that the config has at ``key``; ``names``: of the keys there that a line may begin with, such as ``dataset``,
        which is what reads rows believes its block to be."""
        text = str(self)
        for name, other in {"dataset": key, **names}.items():
            if text.startswith(name) and text[len(name) : len(name) + 1] in ("", " ", ".", ":", "="):
                return type(self)(other + text[len(name) :])
        return type(self)(f"{key}: {text}")


class UsageError(UserError):
    """Words of a command that it does not take, or that are missing. The exit code is 2, as argparse's."""

    exit_code = 2


@contextlib.contextmanager
def writing(place: str, remedy: str = "give another folder", kind: type[UserError] = UserError) -> Iterator[None]:
    """Raises a UserError of the ``kind`` for an OSError of the block: ``place``, as the user gave it, cannot be written."""
    try:
        yield
    except OSError as error:
        raise kind(f"{place} cannot be written ({error.strerror or error}); {remedy}") from error


class Unavailable(UserError):
    """What another start may find changed: a folder that is in use, a full disk. A job script tries these again, other mistakes never."""


class NotFinite(UserError):
    """A loss, gradient or weight that is not finite. Where the ranks are started again, a second time from the same checkpoint ends the run."""


class WriteFailed(OSError):
    """Files could not be written, usually because the disk is full; files that were there before are unchanged."""


# Messages of gloo and NCCL when another process of the group has exited; that process has its own, better error.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "connection was closed",
    "remote process exited",
    "Broken pipe",
)
# gloo's, of a collective and of those that were sent after it; NCCL aborts the process itself.
_TIMED_OUT = ("Timed out waiting", "Application timeout")


def report_user_errors(main: Callable[..., Any]) -> Callable[..., None]:
    """Decorates a program's main function: a UserError becomes one line on stderr and its exit code, 1 or 2.

    torchrun ends all ranks when the first one exits. Rank 0 reports at once. The others wait before they do, since most mistakes
    occur on every rank and one message is enough; a rank that only lost a peer waits for the peer's own error.
    """

    @functools.wraps(main)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        rank = os.environ.get("RANK", "0")
        try:
            main(*args, **kwargs)
        except UserError as error:
            # A data-loader worker's error arrives with its traceback, which ends in the message.
            message = str(error).rpartition("UserError: ")[2].strip()
            # With the file there torchrun's agent starts no rank again. A job script does where it is empty.
            if not (isinstance(error, NotFinite) and is_restarted()):
                _write_error_file("" if isinstance(error, Unavailable) else message + "\n")
            status.report(now=True, error=message)
            if rank != "0":
                time.sleep(10)
            _print(f"finch: error: {message}")
            _exit(error.exit_code)
        except KeyboardInterrupt:
            _print("finch: interrupted")
            _exit(130)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and _is_reader_gone():
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the last flush would complain
                _exit(1)
            status.report(now=True, error=one_line(f"{type(error).__name__}: {error}"))
            if "LOCAL_RANK" not in os.environ:
                raise
            reason = str(error) if isinstance(error, RuntimeError) else ""
            has_timed_out = any(sign in reason for sign in _TIMED_OUT)
            if any(sign in reason for sign in _LOST_PEER) and not has_timed_out:
                time.sleep(5)
                _print(f"finch: rank {rank} stopped because another rank did; that rank's error is above")
                _exit(1)
            traceback.print_exc()
            if has_timed_out:
                _print(
                    f"finch: error: rank {rank} has waited for another rank longer than distributed_timeout; the stacks above, of every rank, show "
                    "which one is stuck and where"
                )
                _exit(HANG)
            _exit(1)

    return wrapper


def is_restarted() -> bool:
    """Whether torchrun starts the ranks again where one fails."""
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def exit_without_teardown() -> None:
    """Ends a rank that has finished, without the interpreter's teardown; a no-op outside of torchrun.

    During teardown a thread of gloo occasionally aborts the process ("terminate called without an active exception"), and torchrun
    would report a finished run as failed.
    """
    if "LOCAL_RANK" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def one_line(text: str) -> str:
    """``text`` as a terminal can print it, without the middle where it is too long. Paths, and so commands, count only by their parts."""
    text = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    if len(text) <= _MAX_LINE:
        return text
    words = ["/".join(_without_middle(part, _MAX_WORD) for part in word.split("/")) for word in text.split(" ")]
    return _without_middle(" ".join(words), _MAX_LINE + sum(len(word) for word in words if "/" in word))


def _without_middle(text: str, length: int) -> str:
    end = length // 3
    return text if len(text) <= length else f"{text[: length - end - 3]}...{text[-end:]}"


def _print(message: str) -> None:
    if sys.stderr.isatty():
        with contextlib.suppress(ModuleNotFoundError):  # rich comes with the extra torchtune
            from rich.console import Console
            from rich.text import Text

            text = Text(message)
            text.highlight_regex("^finch: error:", "bold red")  # no colour with NO_COLOR
            Console(stderr=True).print("", text, sep="\n")
            return
    print(f"\n{message}", file=sys.stderr, flush=True)  # on a separate line, after a progress bar


def _is_reader_gone() -> bool:
    """Whether nobody reads standard output any more: `finch ... | head`."""
    try:
        # The pipe that broke may be another one, such as a server's; only writing to standard output tells.
        print(flush=True)
    except BrokenPipeError:
        return True
    return False


def _write_error_file(text: str) -> None:
    """Leaves a text for the job script that starts the ranks: it logs one that is not empty, and does not start them again."""
    if file := os.environ.get(ERROR_FILE):
        with contextlib.suppress(OSError), Path(file).open("x", encoding="utf-8") as opened:  # one rank's is enough
            opened.write(text)


def _exit(code: int) -> None:
    """Ends the process; without teardown if it has a process group, whose teardown could wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Looked up, not imported: a mistake that is found before torch is loaded ends the program at once.
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        os._exit(code)
    sys.exit(code)
