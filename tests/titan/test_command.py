"""The command line: `python -m torchtitan.train --module MODULE --config NAME`."""

from __future__ import annotations

from helpers.titan_runs import start


def test_mistake_is_one_line(shared_data, tmp_path):
    arguments = ["--module", "helpers.titan_configs", "--config", "finch", "--dump_folder", str(tmp_path)]
    done = start(1, [*arguments, "--parallelism.spmd_backend", "full_dtensor"], shared_data)
    assert done.returncode == 1
    lines = [line for line in done.stdout.splitlines() if "finch: error" in line]
    assert len(lines) == 1, done.stdout[-3000:]
    assert lines[0].startswith("finch: error: parallelism.spmd_backend=full_dtensor is not supported")
    assert "UserError" not in done.stdout
