"""Which batch fits a GPU's memory: `finch estimate` of at most three candidates, in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.base.files import atomic_file
from finch.distributed.processes import without_launcher

LIMIT_S = 30.0
"""For all candidates together."""

_WAIT_S = 2 * LIMIT_S
_SHARE = 0.9  # of the memory; the rest is for what the estimate does not count
_OF_NO_STEP = re.compile(r"(output_dir|seed|epochs|optimizer\.lr|lr_scheduler\b.*|log_\w+|resume_\w+|overwrite)=")

Keys = dict[str, Any]


def choose(
    blocks: Keys,
    overrides: Sequence[str],
    candidates: Sequence[Keys],
    *,
    ranks: int,
    memory: int,
    rows: tuple[int, int],
) -> tuple[Keys, str]:
    """The first candidate that fits, else the last one, and a line about it; the same on all ranks of a machine.

    Local rank 0 tries them and keeps the answer under ``~/.cache/finch``, where the others wait for it and a later start finds it.

    Args:
        blocks: the complete config without the keys of the candidates.
        overrides: the command line's.
        ranks: on all nodes.
        memory: of one GPU, in bytes.
        rows: tokens and target tokens of a long row.

    Raises UserError if local rank 0 gives no answer.
    """
    file = _cache() / f"{_fingerprint(blocks, overrides, candidates, ranks, memory, rows)}.json"
    if not file.exists() and int(os.environ.get("LOCAL_RANK", 0)) == 0:
        answer = _try(blocks, overrides, candidates, ranks=ranks, memory=memory, rows=rows)
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_file(file) as partial:
            partial.write_text(json.dumps(answer), encoding="utf-8")
    end = time.monotonic() + _WAIT_S
    while not file.exists():
        if time.monotonic() > end:
            raise UserError(
                f"batch_size: local rank 0 has not chosen one within {_WAIT_S:.0f} s ({file}); give batch_size=N"
            )
        time.sleep(0.1)
    number, message = json.loads(file.read_text(encoding="utf-8"))
    return dict(candidates[number]), message


def _try(
    blocks: Keys,
    overrides: Sequence[str],
    candidates: Sequence[Keys],
    *,
    ranks: int,
    memory: int,
    rows: tuple[int, int],
) -> tuple[int, str]:
    """The number of the candidate, and the line."""
    limit, end, last = _SHARE * memory / 1e9, time.monotonic() + LIMIT_S, len(candidates) - 1
    message, keys = "", list[str]()
    environment = {**without_launcher(os.environ), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    shape = ["--seq", str(rows[0]), "--targets", str(rows[1]), "--gpus", str(ranks), "--gpu-memory", f"{limit:g}"]
    with tempfile.TemporaryDirectory(prefix="finch_auto_") as folder:
        file = Path(folder) / "config.yaml"
        OmegaConf.save(OmegaConf.create(blocks), file)
        for number, candidate in enumerate(candidates):
            keys = [f"{key}={value}" for key, value in candidate.items()]
            command = [sys.executable, "-P", "-m", "finch.cli", "estimate", str(file), *shape, *overrides, *keys]
            try:
                seconds = max(end - time.monotonic(), 0.1)
                done = subprocess.run(command, env=environment, timeout=seconds, capture_output=True, text=True)
            except subprocess.TimeoutExpired:
                return last, f"the estimate was not done in {LIMIT_S:.0f} s: the candidate that takes the least memory"
            peak = re.search(r"^ +peak +([\d.]+ \w+)$", done.stdout, re.MULTILINE)
            if peak is None:
                lines = done.stderr.strip().splitlines() or ["it printed nothing"]
                return last, f"no estimate ({lines[-1]}): the candidate that takes the least memory"
            message = f"rows of {rows[0]} tokens take {peak[1]} of {limit:.3g} GB by `finch estimate`"
            if done.returncode == 0:
                return number, message
    return last, f"{message}: too much; {', '.join(keys)} all the same"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finch" / "auto"


def _fingerprint(blocks: Keys, overrides: Sequence[str], *more: Any) -> str:
    """Of all that a step's memory depends on; a sweep's rates and seeds leave it as it is."""
    blocks = {key: value for key, value in blocks.items() if not _OF_NO_STEP.match(f"{key}=")}
    versions = [metadata.version(package) for package in ("finch-finetune", "torch", "torchtune")]
    known = [blocks, [each for each in overrides if not _OF_NO_STEP.match(each)], more, versions]
    return hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:16]
