"""A mistake in a path, a key or a value is refused before a package is imported that takes seconds."""

import json
import subprocess
import sys

from benchmarks.first_answer import HEAVY, KEYS, PATHS

PROGRAM = f"""
import contextlib, io, json, sys
from finch.cli.main import main
for words, start in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        main(words)
    heavy = set({HEAVY}) & set(sys.modules)
    if heavy or start not in said.getvalue():
        sys.exit(f"{{words}}: {{said.getvalue()}}, imports {{heavy}}")
"""


def test_mistakes_are_refused_before_heavy_imports(base_folder, rows_file, tmp_path):
    given = f"model_dir={base_folder}", f"data_files={rows_file}"
    mistakes = [(command.format(*given).split(), start) for command, start in {**PATHS, **KEYS}.items()]
    command = [sys.executable, "-c", PROGRAM, json.dumps(mistakes)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
