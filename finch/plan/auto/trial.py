"""Which batch fits a GPU's memory: an estimate of at most three candidates."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from finch.base.errors import UserError, one_line
from finch.base.files import gigabytes, replace_text
from finch.cli.early_checks import only_errors_logged
from finch.config.parser import merge, recipe_of
from finch.config.schema import RECIPES, affecting
from finch.config.validation import check
from finch.distributed import parallel

LIMIT_S = 30.0
"""After this no further candidate is tried."""

_SHARE = 0.9  # of the memory; the rest is for what the estimate does not count
_OF_NO_STEP = affecting("place") - {"device"} | {"seed", "epochs", "optimizer.lr", "lr_scheduler"}

Keys = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """What all candidates have in common.

    Attributes:
        blocks: the complete config without the keys of the candidates.
        overrides: the command line's.
        ranks: on all nodes.
        memory: of one GPU, in bytes.
        rows: tokens and target tokens of a long row.
    """

    blocks: Keys
    overrides: Sequence[str]
    ranks: int
    memory: int
    rows: tuple[int, int]

    def choose(self, candidates: Sequence[Keys]) -> tuple[Keys, str]:
        """The first candidate that fits, else the last one, and a line about it; rank 0's answer on all ranks.

        It is kept under ``~/.cache/finch``, where a later start finds it.
        """
        number, message = json.loads(_from_rank_zero("auto", lambda: self._known(candidates)))
        return dict(candidates[number]), message

    def _known(self, candidates: Sequence[Keys]) -> str:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finch" / "auto"
        file = folder / f"{self._fingerprint(candidates)}.json"
        if file.exists():
            return file.read_text(encoding="utf-8")
        is_estimated, *found = self._try(candidates)
        answer = json.dumps(found)
        if is_estimated:  # else a later start, on a less busy machine, tries them again
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                replace_text(file, answer, is_shared=True)
        return answer

    def _try(self, candidates: Sequence[Keys]) -> tuple[bool, int, str]:
        """Whether it was estimated, the number of the candidate, and the line."""
        limit, end, last = _SHARE * self.memory, time.monotonic() + LIMIT_S, len(candidates) - 1
        message = ""
        for number, candidate in enumerate(candidates):
            if time.monotonic() > end:
                return (
                    False,
                    last,
                    f"the estimate was not done in {LIMIT_S:.0f} s: the candidate that takes the least memory",
                )
            try:
                peak = self._peak(candidate)
            # RuntimeError: a component of the user's own may train, and take no fake tensors.
            except (UserError, RuntimeError) as error:
                return False, last, one_line(f"no estimate ({error}): the candidate that takes the least memory")
            message = (
                f"rows of {self.rows[0]} tokens take {gigabytes(peak)} of {limit / 1e9:.3g} GB by `finch check --exact`"
            )
            if peak <= limit:
                return True, number, message
        return True, last, f"{message}: too much; {', '.join(_words(candidates[last]))} all the same"

    def _peak(self, candidate: Keys) -> int:
        """Bytes on a GPU, in a step of the candidate on fake tensors."""
        from finch.plan.estimate.fake_step import estimate_step
        from finch.plan.estimate.formula import Rows
        from finch.training import config_checks

        with only_errors_logged():
            cfg, _ = merge(self.blocks, [*self.overrides, *_words(candidate)])
            recipe = recipe_of(cfg)
            check(cfg, RECIPES[recipe], user_keys=self.blocks)
            config_checks.check(cfg, torch.device("cuda"), self.ranks)
            return estimate_step(recipe, cfg, ranks=self.ranks, rows=Rows(*self.rows)).device_peak

    def _fingerprint(self, candidates: Sequence[Keys]) -> str:
        """Of all that a step's memory depends on; a sweep's rates and seeds leave it as it is."""
        known = asdict(self)
        known["blocks"] = {key: value for key, value in self.blocks.items() if key not in _OF_NO_STEP}
        given = {each: each.partition("=")[0] for each in self.overrides}
        known["overrides"] = [each for each, key in given.items() if not {key, key.split(".")[0]} & _OF_NO_STEP]
        versions = [metadata.version(package) for package in ("finch-finetune", "torch", "torchtune")]
        text = json.dumps([known, candidates, versions], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _words(keys: Keys) -> list[str]:
    return [f"{key}={value}" for key, value in keys.items()]


def _from_rank_zero(key: str, compute: Callable[[], str]) -> str:
    """What ``compute`` returns on rank 0, for all ranks, before they have a process group: through the store in which they will meet. ``key``:
    a name that no other call has."""
    if parallel.launched_ranks() == 1:
        return compute()
    store = dist.PrefixStore("finch", _store())
    if parallel.launched_rank() == 0:
        store.set(key, compute())
    return str(store.get(key), "utf-8")


@functools.cache
def _store() -> dist.Store:
    """Kept: where rank 0 serves it, and not torchrun, it would end with the last reference."""
    store: dist.Store = next(dist.rendezvous("env://"))[0]
    return store
