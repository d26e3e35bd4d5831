"""The attention phase of the full check, which has longer prefixes than the quick one."""

import pytest

from finch.plan.gpu_check import attention
from finch.plan.gpu_check.report import FAILED, Check


@pytest.mark.slow
def test_full_phase_is_right_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", "aot_eager")
    check = Check("cpu", tmp_path, ranks=1, quick=False)
    attention.run(check)
    assert any(f"prefix {attention.LONG_PREFIX}" in line.name for line in check.lines)
    assert [line for line in check.lines if line.status == FAILED] == []
