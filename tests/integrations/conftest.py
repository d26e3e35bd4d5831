"""A Trainer collects garbage when it ends: a second each time, with all that the session has imported since its tests were collected."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> None:
    gc.collect()
    gc.freeze()
