from __future__ import annotations

import os

import pytest
from helpers.runs import ROOT

from finch.base.log import logger
from finch.plan.gpu_check.report import Check


@pytest.fixture(autouse=True)
def _log_level():
    """A run sets that of its process, here ERROR."""
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def check(tmp_path, monkeypatch):
    """A quick check on the CPU, whose processes find the helpers of the tests."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "recipes", ROOT / "tests"))))
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    return Check("cpu", tmp_path, ranks=2)
