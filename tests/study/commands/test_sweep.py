"""`finch sweep` on a small model: its checks, its commands, and a sweep whose runs are real."""

import json
import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
import yaml
from helpers.runs import finch, make_config, weights

from finch.study.sweep.job import Job

REPLAY = {"method": ["lr_replay"], "lr_scheduler.log": [{"cell": {"method": "finch"}}]}


@pytest.fixture
def grid(tmp_path, base_folder, rows_file):
    """Writes a grid of a small config; returns its path."""
    config = make_config(base_folder, rows_file, tmp_path / "run", max_steps_per_epoch=2, check_dataset=False)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))

    def write(mappings, **content):
        content = {"config": str(tmp_path / "config.yaml"), "out": str(tmp_path / "out"), "grid": mappings, **content}
        (tmp_path / "grid.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return str(tmp_path / "grid.yaml")

    return write


def test_sweep_trains_and_interpolates_and_skips_what_is_finished(grid, tmp_path, base_folder, capsys):
    mappings = [{"method": ["sft"], "seed": [0]}, {"method": ["wise_ft"], "seed": [0], "alpha": [0.25]}]
    file = grid(mappings)
    code, printed, _ = finch(capsys, "sweep", file)
    out = tmp_path / "out"
    assert (code, printed.splitlines()[-1]) == (0, "all 2 cells are done"), printed
    tuned, base = weights(out / "sft_seed0" / "epoch_0"), weights(base_folder)
    blended = weights(out / "wise_ft_seed0_alpha0.25" / "best")
    assert all(torch.equal(blended[key], (1 - 0.25) * base[key] + 0.25 * tuned[key]) for key in tuned)
    assert json.loads((out / "wise_ft_seed0_alpha0.25" / "cell.json").read_text()) == {
        "values": {"method": "wise_ft", "seed": 0, "alpha": 0.25},
        "task": None,
        "source": "../sft_seed0",
        "status": "finished",
    }

    run = out / "sft_seed0"
    written = (run / "metrics.jsonl").stat().st_mtime_ns
    assert finch(capsys, "sweep", file)[0] == 0
    assert (run / "metrics.jsonl").stat().st_mtime_ns == written
    assert "all 2 cells are done or in the queue" in finch(capsys, "sweep", file, "--slurm", "--dry-run")[1]

    def is_trained(*overrides):
        printed = finch(capsys, "sweep", file, "--dry-run", *overrides)[1]
        return bool(re.search("^sft_seed0 +done +none$", printed, re.M))

    assert [is_trained(*words) for words in ((), ("save_last_epoch_only=True",), ("epochs=2",))] == [True, True, False]
    (run / "REQUEUE").touch()
    assert not is_trained()
    (run / "REQUEUE").unlink()
    shutil.rmtree(run / "checkpoints")  # to save room
    assert is_trained()
    (run / "epoch_0").rename(run / "elsewhere")
    assert not is_trained()
    (run / "elsewhere").rename(run / "epoch_0")
    error = finch(capsys, "sweep", file, "--dry-run", "batch_size=2")[2]
    assert "cell sft_seed0: " in error
    assert "holds a run with batch_size=4, the grid says 2" in error


@pytest.mark.parametrize(
    ("mappings", "arguments", "message"),
    [
        ({"optimizer.lr": [1e-3, -1]}, (), "cell lr-1: optimizer.lr=-1 must be a number above 0"),
        ({"method": ["lora"], "seed": [0]}, ("model=torchtune.models.mistral.mistral_7b",), "cell lora_seed0: "),
        (
            [{"method": ["finch"]}, {**REPLAY, "lr_scheduler.shape": ["flat"]}],
            (),
            "cell lr_replay_log-finch_shape-flat: lr_scheduler.shape=flat must be curve, linear or mean: ",
        ),
        (
            {"method": ["sft"], "log_level": ["INFO", "ERROR"]},
            (),
            "cells sft_log_level-INFO and sft_log_level-ERROR are the same run; leave one out of the grid",
        ),
        (
            {"method": ["sft"], "log_level": ["INFO", "ERROR"]},
            ("checkpointer.output_dir=${output_dir}",),
            "cells sft_log_level-INFO and sft_log_level-ERROR are the same run",
        ),
        (
            {"method": ["dft"]},
            ("loss=torch.nn.CrossEntropyLoss",),
            "cell dft: method=dft, but other keys of the grid make it sft; leave them out, or give the mapping a label",
        ),
        (
            {"method": ["small_lr"]},
            ("optimizer.lr=3e-4",),
            "cell small_lr: optimizer.lr=3e-4 would be method=small_lr's too; give optimizer.lr in the config, or in the grid",
        ),
        ({"seed": [0]}, ("--jobs", "0"), "--jobs 0 must be at least 1"),
        ({"seed": [0]}, ("--nodes", "2"), "--nodes is not an option of finch sweep; options of sbatch need --slurm"),
        ({"seed": [0]}, ("--slurm", "overwrite=True"), "overwrite=True: a job that is requeued would start from"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(grid, tmp_path, capsys, mappings, arguments, message):
    code, _, error = finch(capsys, "sweep", grid(mappings), *arguments)
    assert code == (2 if "not an option" in message else 1)
    [line] = [line for line in error.splitlines() if line.startswith("finch: error: ")]
    assert message in line
    assert not (tmp_path / "out").exists()


def test_fewer_gpus_than_cells_at_a_time_are_one_line(grid, capsys, caplog, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr("finch.study.sweep.local.LocalSweep.run", lambda self: {})
    text = "--jobs {}: there are 2 GPUs here, whose memory cells share; --jobs {} gives each cell its own"
    for jobs, ranks, fitting in (("8", "1", 2), ("2", "2", 1), ("2", "1", None)):
        caplog.clear()
        assert finch(capsys, "sweep", grid({"seed": [0]}), "--jobs", jobs, "--nproc_per_node", ranks)[0] == 0
        found = [record.message for record in caplog.records if "--jobs" in record.message]
        assert found == ([text.format(jobs, fitting)] if fitting else [])


def test_unknown_grid_names_the_nearest(capsys):
    assert "did you mean sweeps/qwen3_4B_clip_grad_norm?" in finch(capsys, "sweep", "qwen3_4B_clip_norm")[2]
    assert "GRID is missing" in finch(capsys, "sweep")[2]


def test_eta_max_follows_a_rate_above_it(grid, capsys, caplog):
    """Unless the grid names it: FINCH would train at a constant rate."""
    for mappings, is_adapted in (
        ({"method": ["finch", "sft"], "optimizer.lr": [1e-2]}, True),
        ({"method": ["finch"], "optimizer.lr": [1e-2], "lr_scheduler.eta_max": [5e-3]}, False),
        ({"method": ["finch"], "optimizer.lr": [1e-5]}, False),
    ):
        caplog.clear()
        printed = finch(capsys, "sweep", grid(mappings), "--dry-run")[1]
        assert ("lr_scheduler.eta_max=auto" in printed) == is_adapted
        assert ("1 of 2 cells have a rate above the config's eta_max, such as finch" in caplog.text) == is_adapted
        below = "0.16" if is_adapted else "4" if len(mappings) == 3 else "4e-06"
        assert re.search(rf"^finch\S+ +to do +none +below {below} nats$", printed, re.MULTILINE)
        assert re.search(r"^sft\S+ +to do +none$", printed, re.MULTILINE) or not is_adapted


def test_eta_max_follows_a_rate_of_all_cells(grid, capsys):
    """A cell of lr_replay has no cap, and at first no log."""
    code, printed, error = finch(
        capsys, "sweep", grid([{"method": ["finch"]}, REPLAY]), "--dry-run", "optimizer.lr=1e-2"
    )
    assert (code, "lr_scheduler.eta_max=auto" in printed) == (0, True), error


def test_cells_are_compared_before_their_average(grid, capsys, caplog):
    """It would be made at each run's end, and neither evaluated nor reported."""
    for method, is_averaged in (("preserve", True), ("sft", False)):
        methods = [method, f"wise_ft+{method}", "dft"]
        caplog.clear()
        code, printed, error = finch(capsys, "sweep", grid({"method": methods}), "--dry-run")
        assert code == 0, error
        [command] = [line for line in printed.splitlines() if "method=" in line]  # the first cell's
        assert (f"method={method}" in command, "average=null" in command) == (True, is_averaged)
        text = "1 of 3 cells are compared before their average, such as preserve: they train with average=null"
        assert (text in caplog.text) == is_averaged
        unmeasured = f"1 of 3 cells are averages, such as wise_ft+{method}, which only an evaluation measures"
        assert unmeasured in caplog.text


def test_rows_that_have_changed_since_a_run_are_refused(grid, tmp_path, rows_file, capsys):
    rows = shutil.copy(rows_file, tmp_path / "rows.jsonl")
    file = grid({"method": ["sft"]}, overrides={"dataset.data_files": str(rows)})
    assert finch(capsys, "sweep", file)[0] == 0
    os.utime(rows)  # as in a copy of the folder
    assert finch(capsys, "sweep", file)[1].splitlines()[-1] == "all 1 cells are done"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[1:]))
    code, _, error = finch(capsys, "sweep", file)
    assert (code, "sft holds a run with hashes of dataset.data_files=[" in error) == (1, True), error
    assert finch(capsys, "sweep", file, "--dry-run", "overwrite=True")[0] == 0


def test_dry_run_prints_runs_and_evaluations(grid, tmp_path, base_folder, capsys):
    evaluate = {"tasks": ["tofu", "mine"], "new_task": "mine", "include_path": "yaml"}
    file = grid({"method": ["sft"], "seed": [0]}, evaluate={**evaluate, "data_root": "data", "limit": 5})
    code, _, error = finch(capsys, "sweep", file, "--slurm", "--dry-run", "--nproc_per_node", "2")
    assert (code, "with --slurm the ranks of a run are its GPUs: --gpus-per-node=2" in error) == (2, True)
    code, printed, error = finch(capsys, "sweep", file, "--dry-run", "--nproc_per_node", "2", "dtype=bf16_mixed")
    assert (code, "finch: error: --include-path=yaml is not a folder" in error) == (1, True)  # below the table
    assert printed.splitlines()[:2] == [
        "cell       training   evaluation  FINCH at its cap",
        "sft_seed0  to do      to do",
    ]
    run, tasks = (line.partition(" -m finch.cli ")[2] for line in printed.splitlines()[2:] if line)
    out = tmp_path / "out"
    words = f"dtype=bf16_mixed method=sft seed=0 output_dir={out}/sft_seed0 resume_from_checkpoint=auto"
    assert run == f"run --nproc_per_node 2 {tmp_path}/config.yaml {words}"
    common = f"evaluate --base {base_folder} --tuned {out}/sft_seed0 --out {out} --trust --data-root data --limit 5"
    assert tasks == f"{common} --tasks tofu,mine --include-path yaml --new-task mine"


def test_epochs_that_are_chosen_from_are_scored_before_the_run(grid, tmp_path, base_folder, capsys):
    evaluate = {"suites": ["knowledge"], "select_by": "knowledge_validation"}
    file = grid({"method": ["sft"]}, evaluate=evaluate, overrides={"epochs": 2})
    code, printed, error = finch(capsys, "sweep", file, "--dry-run")
    assert (code, "--data-root is missing and HF_HUB_OFFLINE=1 forbids the hub" in error) == (1, True)
    epochs, run = (line.partition("--base ")[2] for line in printed.splitlines() if " evaluate " in line)
    out = tmp_path / "out"
    models = f"{out}/sft/epoch_0 {out}/sft/epoch_1"
    assert epochs == f"{base_folder} --tuned {models} --out {out} --trust --suite knowledge_validation"
    assert run == f"{base_folder} --tuned {out}/sft --out {out} --trust --suite knowledge,knowledge_validation"
    error = finch(capsys, "sweep", file, "--dry-run", "save_last_epoch_only=True")[2]
    assert "cell sft: save_last_epoch_only=True leaves no epochs to choose from by evaluate.select_by" in error


def test_slurm_dry_run_prints_an_array_and_what_depends_on_it(grid, tmp_path, capsys, caplog, monkeypatch):
    mappings = [{"method": ["finch", "lora"], "seed": [0]}, {**REPLAY, "seed": [0]}]
    file = grid(mappings, evaluate={"suites": ["forgetting"], "data_root": "/nowhere"})
    dry_run = ("sweep", file, "--slurm", "--dry-run")
    code, printed, error = finch(capsys, *dry_run, "--gpus-per-node=2", "--jobs", "4", "epochs=2")
    assert code == 0, error
    assert (
        "evaluate.data_root=/nowhere is no folder on this machine; the evaluation, after all runs, needs it"
        in caplog.text
    )
    lines = printed.splitlines()
    out = tmp_path / "out"
    assert f"# task 1 of {out}/slurm/cells_0: finch_lora_finetune " in lines[1]
    assert f"--array=0-1%4 --output={out}/slurm/%A_%a.out {out}/slurm/sweep.sbatch {out}/slurm/cells_0 " in lines[2]
    assert f"lr_scheduler.log={out}/finch_seed0" in lines[3]
    assert "--array=0-0%4 --dependency=afterany:JOB " in lines[4]
    assert "--nodes=1 --dependency=afterany:JOB:JOB " in lines[5]
    assert lines[5].endswith(f"sweep.sbatch {file} epochs=2 --out {out} --jobs 2")
    assert not os.path.exists(out)
    printed = finch(capsys, *dry_run, "--skip-training")[1]
    assert (printed.count("sbatch --parsable"), "--dependency" in printed) == (1, False)
    monkeypatch.setenv("FINCH_CONTAINER", "finch.sqsh")
    monkeypatch.setenv("FINCH_CONTAINER_MOUNTS", "/models")
    printed = finch(capsys, *dry_run)[1]
    assert printed.count(f"FINCH_CONTAINER_MOUNTS=/models,{out},{tmp_path} ") == 3  # the folder of grid and config


def test_cells_that_are_added_to_a_queued_sweep_are_evaluated_after_it(grid, tmp_path, capsys, monkeypatch):
    """By a job of their own, which waits for them and for the evaluation that is queued; they wait for no evaluation."""
    (tmp_path / "bin").mkdir()
    scripts = {"sbatch": f'echo "$@" >> {tmp_path}/log; wc -l < {tmp_path}/log', "squeue": "echo 0"}
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def submit(*seeds):
        file = grid([{"method": ["sft"], "seed": list(seeds)}], evaluate={"suites": ["forgetting"]})
        code, printed, error = finch(capsys, "sweep", file, "--slurm", "--gpus-per-node=1")
        assert code == 0, error
        lines = (tmp_path / "log").read_text().splitlines()
        words = [dict(re.findall(r"--(array|dependency)=(\S+)", line)) for line in lines]
        return words, printed

    first = [{"array": "0-0"}, {"dependency": "afterany:1"}]
    assert submit(0)[0] == first
    words, printed = submit(0)
    assert words == first
    assert "there is nothing to submit" in printed
    second = [{"array": "0-0", "dependency": "afterany:1"}, {"dependency": "afterany:1:2:3"}]
    assert submit(0, 1)[0] == first + second
    third = [{"array": "0-0", "dependency": "afterany:1:3"}, {"dependency": "afterany:1:3:4:5"}]
    assert submit(0, 1, 2)[0] == first + second + third
    assert len({path.read_text() for path in (tmp_path / "out" / "slurm").glob("cells_*")}) == 3


def test_what_an_evaluation_needs_is_checked_before_the_first_cell(grid, tmp_path, capsys, monkeypatch):
    nowhere = str(tmp_path / "nowhere")
    for evaluate, options, message in (
        ({"tasks": ["tofu"], "data_root": nowhere}, (), f"--data-root={nowhere} is not a folder"),
        ({"tasks": ["tofu"], "base": nowhere}, (), f"--base={nowhere} is not a folder"),
        ({"tasks": ["arc_esay"], "include_path": str(tmp_path)}, ("--dry-run",), "--tasks arc_esay is neither a task"),
    ):
        code, _, error = finch(capsys, "sweep", grid({"method": ["sft"]}, evaluate=evaluate), *options)
        assert (code, (tmp_path / "out").exists()) == (1, False)
        assert message in error

    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    cells = {"mappings": {"method": ["sft", "dft", "talr"]}, "overrides": {"epochs": 3}}
    code, _, error = finch(capsys, "sweep", grid(**cells))
    assert (code, (tmp_path / "out").exists()) == (1, False)
    assert "has 1.0 kB free, the 9 models of 3 cells need" in error
    # Two cells at a time have all of theirs.
    error = finch(capsys, "sweep", grid(**cells, keep="best"), "--jobs", "2")[2]
    assert "the 7 models of 3 cells need" in error


def test_failures_with_one_cause_are_one_line(grid, capsys, monkeypatch):
    file = grid({"method": ["sft", "dft"]})
    monkeypatch.setattr("finch.study.sweep.job.FINCH", ["/bin/false"])
    code, printed, error = finch(capsys, "sweep", file)
    assert code == 1
    [line] = [line for line in error.splitlines() if line.startswith("finch: error: ")]
    assert line.startswith("finch: error: sft and 1 more: exit code 1;")
    assert "2 of 2 cells failed" in printed


@pytest.mark.parametrize(("keep", "left"), [("best", "epoch_1"), ("last", "epoch_2")])
def test_kept_model_is_the_best_or_the_last(tmp_path, keep, left):
    for name in ("epoch_0", "epoch_1", "epoch_2", "checkpoints/step_9"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "best").symlink_to("epoch_1")
    cell, grid = SimpleNamespace(folder=tmp_path, kind="run"), SimpleNamespace(keep=keep, evaluation=None)
    Job(grid, cell, "", None).remove_surplus()
    assert {path.name for path in tmp_path.iterdir()} == {left, *(["best"] if keep == "best" else [])}
