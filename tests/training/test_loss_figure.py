"""RUN/loss.png: drawn from metrics.jsonl, never at the cost of the run."""

import json
import subprocess
import sys

import pytest

from finch.training import summary

PNG = b"\x89PNG\r\n\x1a\n"


def steps(number, **changes):
    line = {"loss": 2.0, "ema_loss": 2.5, "lr": 1e-3, "lr_is_capped": False}
    return [{"step": step, **line, **changes} for step in range(1, number + 1)]


@pytest.mark.parametrize(
    ("lines", "labels"),
    [
        (steps(3), ["loss of the step", "EMA"]),
        (steps(3, ema_loss=None), ["loss of the step"]),
        (steps(70, lr_is_capped=True), ["loss of the step", "EMA", "eta_max = 0.001"]),
        ([*steps(2), {"step": 2, "validation_loss": 1.0}], ["loss of the step", "EMA", "validation"]),
        ([*steps(2), {"step": 2, "validation/new/loss": 1.0}], ["loss of the step", "EMA", "validation/new"]),
        (
            [
                {"step": 0, "probe/old/loss": 1.0, "probe/old/kl": 0.0},
                *steps(2),
                {"step": 2, "probe/old/loss_change": 0.5, "probe/old/kl": 0.1},
            ],
            ["loss of the step", "EMA", "old loss", "old kl"],
        ),
        ([*steps(2, loss=None), {"step": 2, "validation_loss": None}], ["loss of the step", "EMA"]),
        ([], ["loss of the step"]),
    ],
)
def test_draw_writes_a_png_with_its_labels(lines, labels, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **b: (drawn.append(figure), savefig(figure, *a, **b)))
    summary.draw(lines, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    found = [label for axes in drawn[0].axes for label in axes.get_legend_handles_labels()[1]]
    assert found == labels


def test_pyplot_is_left_alone(tmp_path):
    code = (
        "import sys; from pathlib import Path; from finch.training.summary import draw; "
        f"draw([], Path({str(tmp_path / 'loss.png')!r})); sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_missing_matplotlib_is_a_debug_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(summary, "find_spec", lambda name: None)
    with caplog.at_level("DEBUG", "finch"):
        summary.update_loss_figure(tmp_path)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert not list(tmp_path.iterdir())


def test_failure_to_draw_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(steps(1)[0]) + "\n")
    (tmp_path / "loss.png").write_bytes(b"the last one")
    monkeypatch.setattr(summary, "tidy", lambda axes: 1 / 0)
    summary.update_loss_figure(tmp_path)
    assert "loss.png could not be drawn (ZeroDivisionError: division by zero)" in caplog.text
    assert (tmp_path / "loss.png").read_bytes() == b"the last one"
