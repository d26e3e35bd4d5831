"""One report over a small sweep, for all tests that only read it."""

import pytest
from helpers.evaluated_runs import make_sweep

pytest.importorskip("matplotlib", reason="the report extra is not installed")


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """A sweep's folder: three methods, two learning rates, two seeds."""
    folder = tmp_path_factory.mktemp("sweep")
    make_sweep(folder, rates=(3e-5, 1e-4), n=90)
    return folder


@pytest.fixture(scope="session")
def report(sweep):
    """The folder of its report."""
    from finch.study.report.report import write_report

    write_report([sweep], sweep / "report")
    return sweep / "report"
