"""Hides what lm-eval, transformers and datasets print in every evaluation and nobody needs; their other warnings stay."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

_NOISE = (
    "`pretrained` model kwarg is not of type",  # the model is loaded before lm-eval sees it
    "Passed an already-initialized model",
    "Combined length of context",  # finch counts these requests
    "Left truncation applied",
    "Overwriting default num_fewshot",
)
_NOISE_INSIDE = (
    "Custom kwargs can be passed to `--metadata`",  # finch passes them
    "/finch-tasks-",  # finch's variant of a task of lm-eval takes its place
    "from None overrides existing task from None",  # a group of such tasks
)


@contextlib.contextmanager
def quiet_harness() -> Iterator[None]:
    """While the context lasts. Imports lm-eval, transformers and datasets."""
    import datasets
    import lm_eval.api.task
    import transformers

    harness = logging.getLogger("lm_eval")
    handler = logging.StreamHandler()
    handler.addFilter(_is_worth_reading)
    level, propagates, bar = harness.level, harness.propagate, lm_eval.api.task.tqdm
    harness.addHandler(handler)
    harness.setLevel(logging.WARNING)
    harness.propagate = False
    lm_eval.api.task.tqdm = lambda iterable, **_: iterable
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        harness.removeHandler(handler)
        harness.setLevel(level)
        harness.propagate = propagates
        lm_eval.api.task.tqdm = bar


def _is_worth_reading(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return not message.startswith(_NOISE) and not any(part in message for part in _NOISE_INSIDE)
