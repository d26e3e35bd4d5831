"""A run's metrics: metrics.jsonl, torchtune's metric logger, and what is shown of them."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from finch.base import files, run_files
from finch.base.log import logger
from finch.base.progress import RunProgress

_LAST_WAIT_S = 5.0
"""For the device, when a run closes."""


class MetricsLog:
    """Accepts a step's metrics as they are, tensors included, and reads tensors only every ``every`` steps, in one transfer.

    One line per step goes into metrics.jsonl; the metric logger and the progress see every ``every``-th. Only rank
    0 writes, but every rank reads at the same steps, so that a non-finite loss stops all of them at the same one.

    Nothing is written in ``folder`` before ``open``. ``world_size``: ranks, for tokens per second and GPU. ``is_late``: a report reads what
    the report before has asked the device for, which by then has the work of the steps since: the host does not wait for it.

    ``nonfinite_step``: the first step, of those that were read, whose ``nonfinite``, ``loss`` or ``gradient``, is not finite; 0: there is none.
    """

    def __init__(
        self,
        folder: Path,
        metric_logger: Any,
        progress: RunProgress | None = None,
        *,
        is_writer: bool,
        every: int = 1,
        world_size: int = 1,
        is_late: bool = False,
    ) -> None:
        self.path = folder / run_files.METRICS
        self._metric_logger, self._progress = metric_logger, progress
        self._is_writer, self._every, self._world_size = is_writer, every, world_size
        self._is_late, self.nonfinite_step, self.nonfinite = is_late, 0, ""
        self._pending: list[dict[str, Any]] = []
        self._asked: list[_Transfer] = []
        self._last_report = time.perf_counter()
        self._file: FileIO | None = None
        self._lines, self._size, self._dose = 0, 0, 0.0
        self._unwritten: list[str] = []

    def open(self, config: Any = None, *, first_step: int = 0, first_lines: int | None = None) -> None:
        """Opens the file.

        Args:
            config: for the metric logger, which writes it into the run's folder as well; secrets redacted.
            first_step: the step a resumed run continues after; later lines of an earlier attempt are dropped.
            first_lines: lines the file had when that step was saved (``num_lines()``); None: unknown.
        """
        if self._is_writer:
            kept = _drop_lines_after(self.path, first_step, first_lines)
            self._lines = len(kept)
            # A log that is gone has taken the sum with it.
            self._dose = functools.reduce(run_files.add_dose, kept, 0.0 if kept or not first_step else math.nan)
            # Unbuffered: a killed run loses no line, and a full disk shows at the line that it refuses.
            self._file = self.path.open("ab", buffering=0)
            self._size = self._file.tell()
            if self._metric_logger is not None:
                self._metric_logger.log_config(OmegaConf.create(config))
        if self._progress is not None:
            self._progress.start(first_step)

    def start_epoch(self, epoch: int) -> None:
        """``epoch`` counts from 0."""
        if self._progress is not None:
            self._progress.start_epoch(epoch)
        self._last_report = time.perf_counter()

    def end_epoch(self) -> None:
        """Reports pending steps and shows the last one."""
        self.flush()
        if self._progress is not None:
            self._progress.end_epoch()

    def add(self, step: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """Adds a step's metrics: numbers, or 0-d tensors that stay unread until the next report.

        Returns the step's line, which may be added to until :meth:`report`.
        """
        self._pending.append({"step": step, **metrics})
        return self._pending[-1]

    def report(self) -> None:
        """Called after each step; reads and reports the pending ones every ``every`` steps."""
        if self._pending and self._pending[-1]["step"] % self._every == 0:
            self._ask()
            self._read(self._asked[: -1 if self._is_late else None])

    def flush(self) -> None:
        """Reads and reports the pending steps."""
        self._ask()
        self._read(self._asked)

    def _ask(self) -> None:
        if self._pending:
            self._asked.append(_Transfer(self._pending))
        self._pending = []

    def _read(self, transfers: list[_Transfer]) -> None:
        self._asked = self._asked[len(transfers) :]
        lines = [line for transfer in transfers for line in transfer.lines()]
        if not lines:
            return
        for key, what in (("grad_norm", "gradient"), ("loss", "loss")):  # a loss explains its gradient
            trained = (line for line in lines if line["num_target_tokens"])  # of no token there is no loss
            bad = [line["step"] for line in trained if not math.isfinite(line.get(key) or 0.0)]
            if bad and not 0 < self.nonfinite_step < bad[0]:
                self.nonfinite_step, self.nonfinite = bad[0], what
        now = time.perf_counter()
        seconds, self._last_report = now - self._last_report, now
        # Steps between two reads are not timed one by one: that would take a synchronisation each. They share the
        # mean.
        rate = sum(line["num_target_tokens"] for line in lines) / seconds / self._world_size
        for line in lines:
            line["tokens_per_second_per_gpu"] = rate
            line["eta_sqrt_loss_sum"] = self._dose = run_files.add_dose(self._dose, line)
        if not self._is_writer or self._file is None:
            return
        self._write(*lines)
        last = lines[-1]
        if self._metric_logger is not None and last["step"] % self._every == 0:
            self._metric_logger.log_dict(
                {key: value for key, value in last.items() if key != "step" and value is not None}, step=last["step"]
            )
        if self._progress is not None:
            self._progress.update(last, rate * self._world_size)

    def write_event(self, line: Mapping[str, Any]) -> None:
        """Writes a line that is not a step's, such as a validation loss, after all pending steps."""
        self.flush()
        if self._file is not None:
            self._write(line)
            if self._metric_logger is not None:
                self._metric_logger.log_dict(
                    {key: value for key, value in line.items() if key not in ("step", "epoch")}, step=line["step"]
                )

    def num_lines(self) -> int:
        """How many lines the file has on the writer, once everything pending is written and on the disk."""
        self.flush()
        if self._file is not None:
            # A full disk behind a network refuses even this: a start after a crash of the machine then has fewer lines.
            with contextlib.suppress(OSError):
                os.fsync(self._file.fileno())
        return self._lines

    def _write(self, *lines: Mapping[str, Any]) -> None:
        """Lines that cannot be written, as on a full disk, are kept and written with the next ones. A file that is no longer there, moved away or
        removed with its folder, is started again."""
        assert self._file is not None
        was_full = bool(self._unwritten)
        self._unwritten += [json.dumps({key: _plain(value) for key, value in line.items()}) + "\n" for line in lines]
        self._lines += len(lines)
        text = "".join(self._unwritten).encode()
        try:
            # A file that was removed can still be written: its lines would be lost without an error.
            if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))):
                self._reopen()
            # An unbuffered write takes as much as the disk has room for, and raises nothing.
            if self._file.write(text) < len(text):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)  # no half line
            if not was_full:
                logger.warning(f"{self.path} cannot be written ({error.strerror}); its lines are kept and tried again")
            return
        self._size, self._unwritten = self._size + len(text), []

    def _reopen(self) -> None:
        assert self._file is not None
        self.path.parent.mkdir(exist_ok=True)
        # Before the old one is closed: where this fails, that one is still there to be tried again.
        file = self.path.open("ab", buffering=0)
        self._file.close()
        self._file, self._size = file, file.tell()
        logger.warning(f"{self.path} was moved or removed while the run writes it; its lines go on in a new one")

    def reset_timer(self) -> None:
        """Excludes the time since the last report from the next tokens per second; called after validation and saving."""
        self._last_report = time.perf_counter()

    def close(self) -> None:
        """Writes pending steps, also after an error: the last steps are the ones that explain it."""
        with contextlib.suppress(RuntimeError):  # a device that has failed cannot be read
            self._ask()
            deadline = time.monotonic() + _LAST_WAIT_S
            self._read([transfer for transfer in self._asked if transfer.has_arrived(deadline)])
        if self._progress is not None:
            self._progress.close()
        if self._file is not None:
            if self._unwritten:
                self._write()
            if self._unwritten:
                logger.warning(f"{self.path} lacks its last {len(self._unwritten)} lines, which could not be written")
            self._file.close()
            self._file = None
        if self._metric_logger is not None:
            self._metric_logger.close()
            self._metric_logger = None


class _Transfer:
    """Brings all tensors of steps' metrics to the host at once, behind what the device has been given so far."""

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines
        self._places = [(line, key) for line in lines for key, value in line.items() if isinstance(value, torch.Tensor)]
        self._event: torch.cuda.Event | None = None
        if self._places:
            # fp64 keeps counts of tokens and fp32 numbers as they are.
            values = torch.stack([line[key].detach().double().reshape(()) for line, key in self._places])
            self._values = values.to("cpu", non_blocking=True)
            # Such a copy goes on after the call returns: without the event the numbers could be read too early.
            if values.is_cuda:
                self._event = torch.cuda.Event()
                self._event.record()

    def has_arrived(self, deadline: float) -> bool:
        """Waits for the device until ``deadline``: after the loss of another rank a collective that never ends may be before it."""
        while self._event is not None and not self._event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def lines(self) -> list[dict[str, Any]]:
        """The lines with numbers in place of tensors; waits for the device to get there."""
        if self._event is not None:
            self._event.synchronize()
        if self._places:
            for (line, key), value in zip(self._places, self._values.tolist(), strict=True):
                line[key] = value
        for line in self._lines:
            line["num_target_tokens"], line["lr_is_capped"] = int(line["num_target_tokens"]), bool(line["lr_is_capped"])
            if not line["num_target_tokens"]:
                line["loss"] = math.nan  # of no token
            # Theorem 1: the per-step forgetting is at most C1 * eta * sqrt(L_B) + ...; this is that leading term up to
            # C1.
            is_update = (
                line.pop("update_weight", 1) > 0 and math.isfinite(line.get("grad_norm") or 0.0) and line["loss"] >= 0
            )
            line["eta_sqrt_loss"] = line["lr"] * math.sqrt(line["loss"]) if is_update else None
        return self._lines


def _drop_lines_after(path: Path, step: int, first_lines: int | None) -> list[dict[str, Any]]:
    """Returns the remaining lines."""
    if not os.path.lexists(path):
        if step:
            logger.warning(f"{path} is gone: the numbers of the steps up to {step} are lost, the run goes on unchanged")
        return []
    lines = run_files.metrics_lines(path)
    # A last line cut short is what a kill leaves. Any other was damaged: a copy of the file is kept.
    if None in lines[:-1]:
        shutil.copyfile(path, f"{path}.damaged")
    # Lines of the saved step may follow its save, such as a validation: the resumed run writes them again, one that begins anew those of step 0.
    last = first_lines if step or first_lines else 0
    kept = [line for line in lines[:last] if line is not None and line["step"] <= step]
    files.replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
    return kept


def _plain(value: Any) -> Any:
    """Strict JSON has no NaN and no infinity."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
