import logging
import subprocess
import sys

import pytest

from finch.base.log import quiet_dependencies


@pytest.fixture
def torchao_logger(monkeypatch):
    logger = logging.getLogger("torchao")
    monkeypatch.setattr(logger, "filters", [])
    return logger


def test_quiet_dependencies_hides_one_notice_of_torchao(torchao_logger, caplog):
    quiet_dependencies()
    quiet_dependencies()
    assert len(torchao_logger.filters) == 1
    torchao_logger.warning("Skipping import of cpp extensions due to incompatible torch version 2.13.0")
    torchao_logger.warning("another warning")
    assert caplog.messages == ["another warning"]


def test_warnings_are_marked():
    """In a process of its own, since pytest's handlers take the place of finch's."""
    code = "from finch.base.log import logger; logger.info('one'); logger.warning('two'); logger.error('three')"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.splitlines() == ["one", "warning: two", "error: three"]
