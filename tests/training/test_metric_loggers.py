"""finch's own metric loggers, behind the log that calls them."""

import csv
import sys
from unittest import mock

import pytest
from omegaconf import OmegaConf

from finch.base.errors import UserError
from finch.training.metric_loggers import CSVLogger, TrackioLogger
from finch.training.metrics import MetricsLog


def test_csv_has_a_row_per_step_and_all_metrics_as_columns(tmp_path):
    """Also of a run that was resumed, whose later steps are taken back, and of metrics that come late. A run that never began has none."""
    CSVLogger(str(tmp_path / "logs")).close()
    assert not (tmp_path / "logs").exists()
    for first_step, loss in ((0, 3.5), (1, 2.5)):
        log = MetricsLog(tmp_path, CSVLogger(str(tmp_path / "logs")), is_writer=True)
        log.open({}, first_step=first_step)
        for step in (1, 2)[first_step:]:
            log.add(step, {"loss": loss, "lr": 0.125, "lr_is_capped": False, "num_target_tokens": 4})
            log.report()
        log.write_event({"step": 2, "validation_loss": 1.5})
        log.close()
    with (tmp_path / "logs" / "metrics.csv").open() as file:
        rows = [(row["step"], row["loss"], row["validation_loss"]) for row in csv.DictReader(file)]
    assert rows == [("1", "3.5", ""), ("2", "2.5", "1.5")]


def test_trackio_gets_the_config_the_steps_and_the_end(tmp_path, monkeypatch):
    """A resumed run continues under the folder's name."""
    trackio = mock.Mock(spec=["init", "log", "finish"], __spec__=object())
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    log = MetricsLog(tmp_path, TrackioLogger(str(tmp_path / "run" / "logs"), space_id="me/it"), is_writer=True)
    log.open(OmegaConf.create({"a": 3, "b": "${a}"}))
    log.add(1, {"loss": 2.0, "lr": 0.125, "lr_is_capped": False, "num_target_tokens": 4})
    log.report()
    log.close()
    name = {"name": "run", "resume": "allow", "auto_log_gpu": False, "space_id": "me/it"}
    assert trackio.mock_calls[0] == mock.call.init("finch", config={"a": 3, "b": 3}, **name)
    assert trackio.mock_calls[1].args[0]["loss"] == 2.0
    assert trackio.mock_calls[1].kwargs == {"step": 1}
    assert trackio.mock_calls[2:] == [mock.call.finish()]


def test_missing_trackio_is_one_line(monkeypatch):
    monkeypatch.setattr("finch.base.extras.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^metric_logger=trackio needs the trackio extra: pip install .*\[trackio\]'$"):
        TrackioLogger("run/logs")
