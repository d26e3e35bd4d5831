"""One Slurm for all tests of a worker."""

import pytest
from helpers.slurm_lab import Lab, NoSlurm


@pytest.fixture(scope="session")
def lab():
    try:
        try:
            started = Lab("cgroup")
        except NoSlurm:
            started = Lab("linuxproc")
    except NoSlurm as reason:
        pytest.skip(str(reason))
    yield started
    started.close()
