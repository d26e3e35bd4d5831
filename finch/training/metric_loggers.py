"""Metric loggers next to torchtune's: trackio, and a table in CSV."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from finch.base import run_files
from finch.base.extras import require_extras


class TrackioLogger:
    """Logs to trackio, which keeps its runs in ``TRACKIO_DIR``; a resumed run goes on in its own.

    Args:
        log_dir: a folder in RUN, whose name is the run's there.
        project: trackio's project.
        **options: more arguments of ``trackio.init``, such as ``space_id``.

    Raises:
        UserError: trackio is not installed.
    """

    def __init__(self, log_dir: str, project: str = "finch", **options: Any) -> None:
        require_extras("metric_logger=trackio", "trackio")
        import trackio

        self._trackio, self._project = trackio, project
        self._options = {
            "name": Path(log_dir).resolve().parent.name,
            "resume": "allow",
            "auto_log_gpu": False,
            **options,
        }

    def log_config(self, config: Any) -> None:
        """Starts the run with its config, secrets redacted."""
        container = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
        self._trackio.init(self._project, config=container, **self._options)

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """``payload``: numbers by name."""
        self._trackio.log(dict(payload), step=step)

    def close(self) -> None:
        """Sends what is still to be sent."""
        self._trackio.finish()


class CSVLogger:
    """Makes RUN/logs/metrics.csv of metrics.jsonl whenever a process of the run ends, also by an error: a row per step, a column per metric.

    Args:
        log_dir: a folder in RUN.
    """

    def __init__(self, log_dir: str) -> None:
        self._folder = Path(log_dir)

    def log_config(self, config: Any) -> None:
        """Nothing: RUN/config.yaml has it."""

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        """Nothing: metrics.jsonl has it, and columns that come later would not be in the first row."""

    def close(self) -> None:
        """Writes the table, if the run has logged anything."""
        log = self._folder.parent / run_files.METRICS
        if not log.exists():
            return
        rows: dict[int, dict[str, Any]] = {}
        for line in run_files.read_metrics(log):
            rows.setdefault(line["step"], {}).update(line)
        self._folder.mkdir(exist_ok=True)
        with (self._folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows.values() for name in row)))
            writer.writeheader()
            writer.writerows(rows.values())
