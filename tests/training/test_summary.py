"""The last lines of a run, and RUN/loss.png, which is drawn from metrics.jsonl and never at the cost of the run."""

import json
import sys
import time
from types import SimpleNamespace

import pytest

from finch.training import summary
from finch.training.hooks import Hook
from finch.training.summary import Summary, forgetting, learning


@pytest.fixture
def run(tmp_path):
    steps = [{"step": number, "epoch": 0, "loss": 1 / number, "num_target_tokens": 1000} for number in (1, 2, 3)]
    lines = [*steps, {"step": 3, "validation_loss": 2.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def summary_of(run, caplog, best, last="epoch_2", validation=True):
    summary, parallel = Summary(), SimpleNamespace(is_rank_zero=True)
    run = SimpleNamespace(path=run, start_time=time.perf_counter() - 3725)
    hooks = {"other": Hook(), "summary": summary}
    replay, base = SimpleNamespace(summary=lambda steps: []), SimpleNamespace(folder="BASE")
    loss = SimpleNamespace(replay=replay, reference=None)
    trainer = {
        "parallel": parallel,
        "run": run,
        "exported": lambda name: last,
        "hooks": hooks,
        "loss": loss,
        "base": base,
    }
    summary.start(SimpleNamespace(**trainer))
    select_by = "validation_loss" if validation else None
    with caplog.at_level("INFO", "finch"):
        summary.after_training(SimpleNamespace(best=best, select_by=select_by, epoch=3, stop=None))
    return caplog.messages


def test_summary_names_the_best_epoch_and_how_to_load_it(run, caplog):
    (run / "epoch_1").mkdir()
    (run / "best").symlink_to("epoch_1")
    assert summary_of(run, caplog, {"epoch": "epoch_1", "validation_loss": 2.5}) == [
        "best epoch: 2 of 3, validation loss 2.5000 nats",
        f'its model: transformers.AutoModelForCausalLM.from_pretrained("{run}/best")',
        "loss 1.0000 nats at step 1, 0.3333 at step 3",
        "3 steps, 3,000 target tokens; 1:02:05 since this start",
        f"next: finch chat {run}; finch average {run}; finch evaluate --base BASE --tuned {run}",
    ]


@pytest.mark.parametrize(
    ("validation", "reason"), [(False, "there are no validation rows"), (True, "no validation loss was finite")]
)
def test_summary_without_best_names_the_last_epoch(validation, reason, run, caplog):
    (run / "epoch_2").mkdir()
    messages = summary_of(run, caplog, None, validation=validation)
    assert messages[0] == f"last epoch: 3 of 3; {reason}"
    assert f'from_pretrained("{run}/epoch_2")' in messages[1]


def test_summary_of_lora_names_the_adapter(run, caplog, monkeypatch):
    for name in ("epoch_2", "epoch_2_adapter", "epoch_0_adapter"):
        (run / name).mkdir()
    monkeypatch.setattr(summary.extras, "peft_conflict", lambda peft, torchao: "peft loads none")
    conflict = "; peft loads none"
    assert summary_of(run, caplog, None)[1].endswith(f'/epoch_2"); its adapter: {run}/epoch_2_adapter{conflict}')
    (run / "best").symlink_to("epoch_0_adapter")
    caplog.clear()
    messages = summary_of(run, caplog, {"epoch": "epoch_0", "validation_loss": 1.0}, last="epoch_2_adapter")
    assert messages[1] == f'its adapter: peft.AutoPeftModelForCausalLM.from_pretrained("{run}/best"){conflict}'


def test_summary_without_the_epochs_folder_has_its_tokens_only(run, caplog):
    best = {"epoch": "epoch_1", "validation_loss": 2.5}  # of the run whose checkpoint this one resumed from
    assert [message.split(",")[0] for message in summary_of(run, caplog, best)[1:]] == ["3 steps"]


def by_group():
    """Five groups of the probe a with an interval, and one that is too small for one."""
    values = dict(zip("abcde", (0.1, 0.2, 0.3, 0.4, 0.5), strict=True))
    ends = {
        f"probe/a/kl_{end}/{group}": value + shift
        for group, value in values.items()
        for end, shift in (("low", -0.1), ("high", 0.1))
    }
    return {**{f"probe/a/kl/{group}": value for group, value in values.items()}, **ends, "probe/a/kl/small": 9.0}


def test_forgetting_is_the_change_at_the_best_epoch_and_the_end():
    def line(step, epoch, loss, accuracy, kl):
        changes = {} if step == 0 else {"probe/a/loss_change": loss - 1, "probe/a/accuracy_change": accuracy - 0.5}
        values = {"probe/a/loss": loss, "probe/a/accuracy": accuracy, "probe/a/kl": kl, **changes}
        return {"step": step, "epoch": epoch, **values, "probe_seconds": 1.0}

    lines = [line(0, 0, 1, 0.5, 0), {"step": 1, "loss": 3.0}, line(2, 0, 1.25, 0.5, 0.1), line(4, 1, 1.5, 0.25, 0.2)]
    assert forgetting(lines, 0) == [
        "probe/a/loss: 1.0000 at step 0, +0.2500 at the best epoch, +0.5000 at step 4",
        "probe/a/accuracy: 0.5000 at step 0, +0.0000 at the best epoch, -0.2500 at step 4",
        "probe/a/kl: +0.1000 at the best epoch, +0.2000 at step 4",
    ]
    assert forgetting(lines, None)[2] == "probe/a/kl: +0.2000 at step 4"
    assert forgetting(lines[:2], None) == []
    assert forgetting([{**line, **by_group()} for line in lines], None)[3] == (
        "probe/a/kl: most of e 0.50 [0.40, 0.60], d 0.40 [0.30, 0.50], c 0.30 [0.20, 0.40]; least of a 0.10 [0.00, 0.20] (95% over prompts)"
    )


def steps(number, **changes):
    line = {"loss": 2.0, "ema_loss": 2.5, "lr": 1e-3, "lr_is_capped": False}
    return [{"step": step, **line, **changes} for step in range(1, number + 1)]


@pytest.mark.parametrize(
    ("lines", "labels"),
    [
        (steps(3, ema_loss=None), ["loss of the step"]),
        (steps(70, lr_is_capped=True), ["loss of the step", "EMA", "eta_max = 0.001"]),
        ([*steps(2), {"step": 2, "validation_loss": 1.0}], ["loss of the step", "EMA", "validation"]),
        ([*steps(2), {"step": 2, "validation/new/loss": 1.0}], ["loss of the step", "EMA", "validation/new"]),
        ([*steps(2), {"step": 2, "probe/old/loss_change": 0.5, "probe/old/kl": 0.1}], ["loss of the step", "EMA", "old loss", "old kl"]),
        ([*steps(2), {"step": 2, "probe/a/kl": 0.1, "probe/a/kl_low": 0.0, **by_group()}], ["loss of the step", "EMA", "a kl", "a kl a", "a kl c", "a kl d", "a kl e"]),
        ([*steps(2, loss=None), {"step": 2, "validation_loss": None}], ["loss of the step", "EMA"]),
        ([], ["loss of the step"]),
    ],
)  # fmt: skip
def test_draw_writes_a_png_with_its_labels(lines, labels, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    savefig = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **b: (drawn.append(figure), savefig(figure, *a, **b)))
    summary.draw(lines, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]
    found = [label for axes in drawn[0].axes for label in axes.get_legend_handles_labels()[1]]
    assert found == labels


def test_pyplot_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # an import of it would fail
    summary.draw([], tmp_path / "loss.png")


def test_missing_matplotlib_is_a_debug_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(summary, "find_spec", lambda name: None)
    with caplog.at_level("DEBUG", "finch"):
        summary.update_loss_figure(tmp_path)
    assert [record.levelname for record in caplog.records] == ["DEBUG"]
    assert not list(tmp_path.iterdir())


def test_failure_to_draw_is_a_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(steps(1)[0]) + "\n")
    (tmp_path / "loss.png").write_bytes(b"the last one")
    monkeypatch.setattr(summary, "name_ends", lambda *panels: 1 / 0)
    summary.update_loss_figure(tmp_path)
    assert "loss.png could not be drawn (ZeroDivisionError: division by zero)" in caplog.text
    assert (tmp_path / "loss.png").read_bytes() == b"the last one"


@pytest.mark.parametrize(
    ("last", "advice"), [(1.5, []), (1.98, ["the loss hardly fell: double"]), (2.5, ["the loss rose: halve"])]
)
def test_loss_that_did_not_fall_comes_with_what_to_try(last, advice):
    """By the same rows: those of an epoch, next to the pretrained model's or an earlier epoch's, not two batches."""
    losses = ((0, 1.0, 1), (0, 2.2, 5), (1, last, 1), (1, None, 2))  # the first epoch's mean per token is 2
    steps = [
        {"step": step, "epoch": epoch, "loss": loss, "num_target_tokens": number}
        for step, (epoch, loss, number) in enumerate(losses, start=1)
    ]
    for pretrained, lines in ((None, steps), (2.0, steps), (2.0, steps[1:3])):
        first, *others = learning(lines, pretrained)
        assert first.endswith(f", {last:.4f} at step 3")
        assert [line.split(" optimizer.lr")[0] for line in others] == advice
    capped = [{**line, "ema_loss": 1.0, "lr_is_capped": line["step"] == 2} for line in steps]
    assert learning(capped, None)[1] == "FINCH was at its cap, lr_scheduler.eta_max, in 33% of the steps"
    assert len(learning([{**line, "epoch": 0} for line in steps], None)) == 1
