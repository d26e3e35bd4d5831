"""Reports without their figures."""

import pytest


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are empty: drawing them takes most of a report's time."""
    empty = '<svg width="1" height="1"></svg>'
    monkeypatch.setattr("finch.study.report.style.write", lambda figure, path: empty)
