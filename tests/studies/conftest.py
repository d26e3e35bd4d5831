"""The studies' grids name their config from the repository's root."""

import pytest
from helpers.runs import ROOT


@pytest.fixture(autouse=True)
def _in_root(monkeypatch):
    monkeypatch.chdir(ROOT)
