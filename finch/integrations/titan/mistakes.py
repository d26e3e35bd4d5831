"""How a user's mistake ends a rank of TorchTitan."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from finch.base.errors import UserError, report_user_errors


@contextlib.contextmanager
def reported_under_torchrun() -> Iterator[None]:
    """Under torchrun, where nobody catches a UserError, it becomes one line and exit code 1.

    Other errors pass through to TorchTitan, which records them.
    """
    try:
        yield
    except UserError as error:
        if "LOCAL_RANK" not in os.environ:
            raise
        report_user_errors(_fail)(error)


def _fail(error: UserError) -> None:
    raise error
