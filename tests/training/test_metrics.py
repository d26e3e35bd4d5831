import json
import math
from unittest import mock

import pytest
import torch

from finch.base.run_files import read_metrics
from finch.training import metrics
from finch.training.metrics import MetricsLog


def step_metrics(loss, **changes):
    known = {"epoch": 0, "loss": loss, "ema_loss": 2.0, "lr": 1e-3, "lr_is_capped": False, "grad_norm": 1.0}
    return {**known, "num_target_tokens": 100, **changes}


def test_metrics_log_reads_tensors_only_when_it_reports(tmp_path):
    recorder, file = mock.Mock(), tmp_path / "metrics.jsonl"
    log = MetricsLog(tmp_path, recorder, is_writer=True, every=3, world_size=2)
    log.open()
    tensors = step_metrics(torch.tensor(4.0), num_target_tokens=torch.tensor(50.0), lr_is_capped=torch.tensor(True))
    for step in (1, 2, 3):
        assert file.read_text() == ""
        log.add(step, tensors)
        log.report()
    log.add(4, step_metrics(1.0))
    assert len(read_metrics(file)) == 3
    log.close()  # writes out the fourth
    lines = read_metrics(file)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert lines[0]["eta_sqrt_loss"] == pytest.approx(1e-3 * math.sqrt(4.0))
    assert [line["eta_sqrt_loss_sum"] for line in lines] == pytest.approx([2e-3, 4e-3, 6e-3, 7e-3])
    assert (lines[0]["lr_is_capped"], lines[0]["num_target_tokens"]) == (True, 50)
    assert len({line["tokens_per_second_per_gpu"] for line in lines[:3]}) == 1
    [logged] = recorder.log_dict.call_args_list
    assert logged.kwargs.get("step", logged.args[-1]) == 3
    recorder.close.assert_called_once()


def test_late_log_reads_what_was_asked_for_a_report_ago(tmp_path):
    file = tmp_path / "metrics.jsonl"
    log = MetricsLog(tmp_path, None, is_writer=True, every=2, is_late=True)
    log.open()
    seen = []
    for step in range(1, 8):
        log.add(step, step_metrics(torch.tensor(float(step) if step != 3 else math.nan)))
        log.report()
        seen.append((len(read_metrics(file)), log.nonfinite_step))
    assert seen == [(0, 0), (0, 0), (0, 0), (2, 0), (2, 0), (4, 3), (4, 3)]
    assert log.num_lines() == 7
    assert [line["loss"] for line in read_metrics(file)] == [1, 2, None, 4, 5, 6, 7]


@pytest.mark.parametrize(("arrives", "steps"), [([False, False, True], [1, 2]), ([False] * 10_000, [2])])
def test_a_closing_log_waits_for_the_device_for_a_while_only(tmp_path, monkeypatch, arrives, steps):
    """After the loss of another rank, what the device is to send may lie behind a collective that never ends."""
    monkeypatch.setattr(metrics, "_LAST_WAIT_S", 0.05)
    log = MetricsLog(tmp_path, None, is_writer=True, every=1, is_late=True)
    log.open()
    log.add(1, step_metrics(torch.tensor(1.0)))
    log.report()
    answers = iter(arrives)
    log._asked[0]._event = mock.Mock(query=lambda: next(answers))
    log.add(2, step_metrics(torch.tensor(2.0)))
    log.close()
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == steps


@pytest.mark.parametrize("lost", [None, "the sums, of an earlier version", "the file"])
def test_sum_of_the_doses_continues(tmp_path, lost):
    file, sums = tmp_path / "metrics.jsonl", []
    for first in (0, 3, 5):
        log = MetricsLog(tmp_path, None, is_writer=True)
        log.open(first_step=first)
        for step in range(first + 1, first + 4):
            log.add(step, step_metrics(math.nan if step == 2 else 0.3 * step))
        log.close()
        if lost == "the file":
            file.unlink()
        elif lost:
            lines = [{key: line[key] for key in line if key != "eta_sqrt_loss_sum"} for line in read_metrics(file)]
            file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sums.append(log._dose)
    doses = [0.0 if step == 2 else 1e-3 * math.sqrt(0.3 * step) for step in range(1, 9)]
    expected = [sum(doses[:3]), sum(doses[:6]), sum(doses)]
    assert sums == (pytest.approx([expected[0], math.nan, math.nan], nan_ok=True) if lost == "the file" else expected)


def test_metrics_log_drops_lines_after_its_checkpoint(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)) + '{"step": 4, "lo')
    log = MetricsLog(tmp_path, None, is_writer=True)
    log.open(first_step=2)
    log.add(3, step_metrics(0.5))
    log.close()
    assert [(line["step"], line["loss"]) for line in read_metrics(file)] == [(1, 1.0), (2, 1.0), (3, 0.5)]


@pytest.mark.parametrize(("first_lines", "kept"), [(None, 0), (1, 1)])
def test_a_run_that_begins_anew_keeps_no_line_of_step_0(tmp_path, first_lines, kept):
    """One that resumes from a state of step 0 keeps those that were written before it."""
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 0, "validation_loss": 1.0}\n{"step": 0, "validation_loss": 2.0}\n')
    log = MetricsLog(tmp_path, None, is_writer=True)
    log.open(first_step=0, first_lines=first_lines)
    log.close()
    assert len(read_metrics(file)) == kept


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"[" * 3000,
        b'{"step": "2"}',
        *(b'{"step": 2, "lr": %s}' % value for value in (b'"high"', b"1e999", b"-1.7e308")),
    ],
)
def test_a_broken_line_is_left_out_and_said(tmp_path, caplog, line):
    file = tmp_path / "metrics.jsonl"
    content = b'{"step": 1, "loss": 1.0}\n' + line + b'\n{"step": 3, "loss": 1.0}\n{"step": 4, "loss": 1.0}\n'
    file.write_bytes(content)
    log = MetricsLog(tmp_path, None, is_writer=True)
    log.open(first_step=3, first_lines=3)
    log.close()
    assert [each["step"] for each in read_metrics(file)] == [1, 3]
    assert caplog.text.count("metrics.jsonl: line 2 cannot be read as a step's and is left out") == 1
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content


@pytest.mark.parametrize("at", ["write", "half a line", "close"])
def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path, caplog, monkeypatch, at):
    log = MetricsLog(tmp_path, None, is_writer=True)
    log.open()
    log.add(1, step_metrics(1.0))
    log.flush()
    file, written = log._file, (tmp_path / "metrics.jsonl").read_bytes()

    class Full:
        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, text):
            if at == "half a line":
                return file.write(text[:10])
            raise OSError(28, "No space left on device")

    log._file = Full()
    for step in (2, 3):
        log.add(step, step_metrics(1.0))
        log.flush()
        assert (tmp_path / "metrics.jsonl").read_bytes() == written
    assert caplog.text.count("cannot be written (No space left on device); its lines are kept") == 1
    if at != "close":
        log._file = file
    log.close()
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")]
    assert steps == ([1] if at == "close" else [1, 2, 3])
    assert ("lacks its last 2 lines" in caplog.text) == (at == "close")


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_file_that_is_moved_away_is_started_again(tmp_path, caplog, what):
    run = tmp_path / "run"
    run.mkdir()
    log = MetricsLog(run, None, is_writer=True)
    log.open()
    moved = run if what == "folder" else run / "metrics.jsonl"
    for step in (1, 2, 3):
        log.add(step, step_metrics(1.0))
        log.flush()
        if step == 1:
            moved.rename(tmp_path / "moved")
    log.close()
    old = tmp_path / "moved" / "metrics.jsonl" if what == "folder" else tmp_path / "moved"
    assert [[line["step"] for line in read_metrics(file)] for file in (old, run / "metrics.jsonl")] == [[1], [2, 3]]
    assert caplog.text.count("run/metrics.jsonl was moved or removed while the run writes it") == 1


def test_lost_metrics_are_said(tmp_path, caplog):
    MetricsLog(tmp_path, None, is_writer=True).open(first_step=3)
    assert "metrics.jsonl is gone: the numbers of the steps up to 3 are lost" in caplog.text


def test_metrics_log_writes_strict_json(tmp_path):
    log = MetricsLog(tmp_path, None, is_writer=True)
    log.open()
    log.add(1, step_metrics(1.0, grad_norm=torch.tensor(math.inf)))
    log.write_event({"step": 1, "epoch": 0, "validation_loss": math.nan})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    step, event = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert (step["grad_norm"], event["validation_loss"]) == (None, None)


def test_a_step_without_targets_has_no_loss(tmp_path):
    log = MetricsLog(tmp_path, None, is_writer=True)
    log.open()
    log.add(1, step_metrics(torch.tensor(0.0), num_target_tokens=torch.tensor(0)))
    log.close()
    [line] = read_metrics(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["eta_sqrt_loss"], line["num_target_tokens"]) == (None, None, 0)


@pytest.mark.parametrize("changes", [{"update_weight": torch.tensor(0.0)}, {"grad_norm": torch.tensor(math.inf)}])
def test_a_step_without_an_update_forgets_nothing(tmp_path, changes):
    """Its objective kept no token, or the schedule has skipped it."""
    log = MetricsLog(tmp_path, None, is_writer=True)
    log.open()
    for step, more in ((1, {}), (2, changes)):
        log.add(step, step_metrics(torch.tensor(4.0), **more))
    log.close()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["loss"], line["eta_sqrt_loss"]) for line in lines] == [(4.0, 2e-3), (4.0, None)]
    assert lines[1]["eta_sqrt_loss_sum"] == 2e-3
    assert "update_weight" not in lines[1]


def test_metrics_log_of_another_rank_writes_nothing(tmp_path):
    log = MetricsLog(tmp_path, None, is_writer=False)
    log.open()
    log.add(1, step_metrics(1.0))
    log.close()
    assert not list(tmp_path.iterdir())
