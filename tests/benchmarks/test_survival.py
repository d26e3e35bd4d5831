"""benchmarks.survival can fail: what it compares and counts, and that it finds a deliberate defect."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.survival import crash_replay, killed_command
from benchmarks.survival.__main__ import Torture, draw_flips, is_detected, summary
from benchmarks.survival.cases import Case
from benchmarks.survival.killed_command import KilledCommand
from benchmarks.survival.killed_run import (
    SIGTERM,
    TAG,
    Job,
    Kill,
    Outcome,
    Timing,
    kill_all,
    members,
    run_killed,
    wait_until_gone,
)
from benchmarks.survival.same_run import differences
from benchmarks.survival.slowed_recipe import END, Phases
from finch.base.run_files import read_metrics
from finch.checkpoint import manifest

# same_run


@pytest.fixture
def pair(tmp_path):
    """The folders of two equal runs at different speeds; the first received SIGTERM after step 5."""

    def make(name, rate, earlier_step):
        run = tmp_path / name
        (run / "epoch_0").mkdir(parents=True)
        save_file({"w": torch.tensor([0.0, 1.0, float("nan")])}, run / "epoch_0" / "model.safetensors")
        (run / "epoch_0" / "config.json").write_text("{}")
        for step in (earlier_step, 8):
            folder = run / "checkpoints" / f"step_{step}"
            folder.mkdir(parents=True)
            (folder / "state.json").write_text(json.dumps({"step": step}))
            manifest.write(folder, {})
        (run / "best").symlink_to("epoch_0")
        lines = [
            {"step": step, "loss": 1.0 / step, "lr": 0.1, "tokens_per_second_per_gpu": rate / step} for step in (1, 2)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return run

    run = make("one", 3.0, 5)
    (run / ".lock").write_text("{}")
    return run, make("other", 5.0, 4)


def test_differences_of_equal_runs_is_empty(pair):
    assert differences(*pair) == []


def change_weight(run, value):
    file = run / "epoch_0" / "model.safetensors"
    save_file({"w": torch.tensor([value, 1.0, float("nan")])}, file)
    assert torch.equal(load_file(file)["w"][:1], torch.tensor([value]))


def change_last_line(run, **values):
    lines = read_metrics(run / "metrics.jsonl")
    lines[-1].update(values)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def change_best(run):
    (run / "best").unlink()
    (run / "best").symlink_to("epoch_1")


CHANGES = {
    "epoch_0/model.safetensors: w differs": lambda run: change_weight(run, -0.0),
    "epoch_0/config.json: content differs": lambda run: (run / "epoch_0" / "config.json").write_text("{ }"),
    "epoch_0/config.json is missing": lambda run: (run / "epoch_0" / "config.json").unlink(),
    "checkpoints/step_8.partial is left over": lambda run: (run / "checkpoints" / "step_8.partial").mkdir(),
    "1 complete checkpoints instead of 2": lambda run: shutil.rmtree(run / "checkpoints" / "step_5"),
    "step_8/state.json: content differs": lambda run: (run / "checkpoints" / "step_8" / "state.json").write_text("{}"),
    "best: target differs": change_best,
    "metrics.jsonl: line 2 differs": lambda run: change_last_line(run, lr=0.10000000000000002),
    "metrics.jsonl: line 3 differs": lambda run: (run / "metrics.jsonl").open("a").write('{"step": 3}\n'),
}


@pytest.mark.parametrize("expected", CHANGES)
def test_differences_names_any_change(expected, pair):
    CHANGES[expected](pair[0])
    [difference] = differences(*pair)
    assert expected in difference


# changed bytes


@pytest.fixture
def two_checkpoints(tmp_path):
    for step in (4, 8):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        for name, size in (("__0_0.distcp", 5000), (".metadata", 50), ("rng_0.json", 10)):
            (folder / name).write_bytes(random.Random(name).randbytes(size))
        manifest.write(folder, {path.name: manifest.file_entry(path) for path in folder.iterdir()})
    return tmp_path


def test_flips_hit_every_file_and_undo_themselves(two_checkpoints):
    folder = two_checkpoints / "checkpoints" / "step_8"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    flips = draw_flips(folder, 30, random.Random(0))
    hits = Counter(flip.file for flip in flips)
    assert hits.keys() == before.keys()
    assert hits["__0_0.distcp"] > 20
    for flip in flips:
        flip.apply(folder)
        assert (folder / flip.file).read_bytes() != before[flip.file]
        flip.apply(folder)
        assert (folder / flip.file).read_bytes() == before[flip.file]


def test_flips_are_detected_but_not_without_checksums(two_checkpoints, monkeypatch):
    flips = draw_flips(two_checkpoints / "checkpoints" / "step_8", 30, random.Random(0))
    assert all(is_detected(two_checkpoints, flip) for flip in flips)
    monkeypatch.setattr(manifest, "verify", lambda *_: None)
    assert {flip.file for flip in flips if is_detected(two_checkpoints, flip)} == {"manifest.json"}


# phases


def test_phases_write_the_one_that_began_last(tmp_path):
    file = tmp_path / "phases"
    phases = Phases(file)
    with phases.phase("training"):
        saving = phases.phase("save")
        saving.__enter__()  # in another thread
        with phases.phase("export"):
            pass
        saving.__exit__(None, None, None)
    assert file.read_text().split() == ["training", "save", "export", "save", "training", END]


# killed_run, on a job of a few lines of Python

SCRIPT = """
import json, os, subprocess, sys, time
from pathlib import Path
run, behaviour = Path(sys.argv[1]), sys.argv[2]
metrics, phases = run / "metrics.jsonl", run.with_name(run.name + ".phases")
run.mkdir(exist_ok=True)
first = 0
if metrics.exists():
    first = max(0, len(metrics.read_text().splitlines()) - 2)
    print(f"resumed from step {first} of checkpoints/step_{first}", flush=True)
    if behaviour == "damaged":
        print("checkpoints/step_9 is damaged (rng_0.json is not as it was written) and is not used", flush=True)
    if behaviour == "fails":
        sys.exit("finch: error: no")
    kept = metrics.read_text().splitlines(True)[:first]
    metrics.write_text("".join(kept))
if behaviour == "outlives":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
phases.write_text("training\\n")
for step in range(first + 1, 11):
    time.sleep(0.1)
    with metrics.open("a") as file:
        file.write(json.dumps({"step": step}) + "\\n")
"""


class Halfway(random.Random):
    def random(self):
        return 0.5


def run_stub(folder, behaviour, kinds, max_lost=2):
    job = Job(folder / "config.yaml", folder / "run")
    job.command = [sys.executable, "-c", SCRIPT, str(job.run), behaviour]
    return run_killed(job, Timing(0.1, 1.0, 10), kinds, Halfway(), max_lost)


@pytest.mark.slow
def test_run_killed_kills_and_resumes_until_the_end(tmp_path):
    outcome = run_stub(tmp_path, "ends", ("tree", "launcher"))
    assert outcome.failures == []
    assert [kill.kind for kill in outcome.kills] == ["tree", "launcher"]
    assert [kill.phase for kill in outcome.kills] == ["training", "training"]
    assert outcome.lost == [2, 2]
    assert [line["step"] for line in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [*range(1, 11)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behaviour", "kind", "max_lost", "expected"),
    [
        ("ends", "tree", 1, "lost 2 steps, more than 1, after tree in training"),
        ("ends", SIGTERM, 2, "lost 2 steps, more than 0, after SIGTERM"),
        ("fails", "tree", 2, "attempt 2 exited with 1: resumed from step 2 of checkpoints/step_2 | finch: error: no"),
        ("damaged", "tree", 2, "checkpoints/step_9 is damaged (rng_0.json is not as it was written)"),
        ("outlives", "launcher", 2, "attempt 1 left process"),
    ],
)
def test_run_killed_names_the_failure(behaviour, kind, max_lost, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.survival.killed_run.EXIT_TIMEOUT_S", 0.5)
    [failure] = run_stub(tmp_path, behaviour, (kind,), max_lost).failures
    assert re.sub(r"step.[0-8]", "step N", expected) in re.sub(r"step.[0-8]", "step N", failure)
    assert members(str(tmp_path / "run")) == []


@pytest.mark.slow
def test_kill_all_reaches_orphans(tmp_path):
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); "
    environment = {**os.environ, TAG: str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)  # the parent has ended
    parent = subprocess.Popen([sys.executable, "-c", code + "time.sleep(60)"], env=environment)
    end = time.monotonic() + 20
    while len(members(str(tmp_path))) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(members(str(tmp_path))) == 3
    kill_all(str(tmp_path))
    assert parent.wait() == -9
    assert wait_until_gone(str(tmp_path), 5) == []


def test_summary_counts_runs_and_kills():
    outcomes = [
        Outcome([Kill("tree", "save: names", 5), Kill("rank", "training", 9)], [1, 3]),
        Outcome([Kill("tree", "start", 0)], [], failures=["weights differ"]),
    ]
    assert summary(outcomes) == [
        "killed: rank 1, tree 2",
        "while in: save: names 1, start 1, training 1",
        "torture: 1 / 2 runs survived; 3 kills, 1 of them in a save; at most 3 steps lost, saving every 4",
    ]


# The real recipe on two ranks


@pytest.fixture(scope="module")
def torture(tmp_path_factory):
    return Torture(tmp_path_factory.mktemp("torture") / "out", seed=0)


@pytest.mark.slow
def test_killed_run_survives_and_flips_are_detected(torture):
    outcome = torture.run(0, ["tree"])
    assert outcome.failures == []
    assert [kill.kind for kill in outcome.kills] == ["tree"]
    assert outcome.kills[0].phase != "start"
    assert outcome.lost
    flips, missed = torture.flips(14)
    assert missed == []
    assert len({flip.file for flip in flips}) == 7


@pytest.mark.slow
def test_deliberate_defect_is_found(torture, tmp_path, monkeypatch):
    """A resumed run that does not restore its random states draws other dropout masks."""
    (tmp_path / "forgetful_recipe.py").write_text(
        "from finch.checkpoint import reader as checkpoint\n"
        "checkpoint.load_rng_state = lambda *_: None\n"
        "from benchmarks.survival.slowed_recipe import exit_without_teardown, recipe_main\n"
        "recipe_main()\n"
        "exit_without_teardown()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    outcome = torture.run(0, ["tree"], recipe="forgetful_recipe")
    assert outcome.kills
    assert any(each.startswith("epoch_1/model.safetensors: ") for each in outcome.failures)
    assert any(each.startswith("metrics.jsonl: ") for each in outcome.failures)


# killed_command and crash_replay, on a command of a few lines of Python

COUNTER = """
import sys, time
from pathlib import Path
file, behaviour = Path(sys.argv[1]) / "numbers", sys.argv[2]
numbers = file.read_text().split() if file.exists() else []
if behaviour == "differs" and not numbers:
    numbers.append("9")
for number in range(len(numbers), 8):
    time.sleep(0.05)
    partial = file.with_suffix(".partial")
    partial.write_text(" ".join(numbers := [*numbers, str(number)]))
    partial.rename(file)
"""


class Counter8(Case):
    name, promise = "counter", re.compile(b"-")
    behaviour = "counts"

    def __init__(self, out):
        self.out, self.job, self.reference, self._start = out, out / "job", out / "reference", out / "start"
        self._start.mkdir(parents=True)

    def command(self):
        return [sys.executable, "-c", COUNTER, str(self.job), self.behaviour]


@pytest.mark.slow
@pytest.mark.parametrize(("behaviour", "difference"), [("counts", []), ("differs", ["numbers: content differs"])])
def test_killed_command_is_continued_and_compared(behaviour, difference, tmp_path, monkeypatch):
    killed = KilledCommand(Counter8(tmp_path), seed=0)
    monkeypatch.setattr(Counter8, "behaviour", behaviour)
    monkeypatch.setattr(killed_command, "SHARE_OF_KILLS_AT_START", 0)
    monkeypatch.setattr(killed_command, "KINDS", {"tree": 1})
    kills, failures = killed.survives(0)
    assert kills > 0
    assert failures == difference


WRITER = """
import os, shutil, sys
from pathlib import Path
folder = Path(sys.argv[1])
with open(folder / "a.partial", "wb") as file:
    file.write(b"hello")
    file.flush()
    os.fsync(file.fileno())
    file.write(b" world" * 3000)
os.rename(folder / "a.partial", folder / "a")
with open(folder / "a", "r+b") as file:
    file.seek(2)
    file.write(b"LL")
    file.truncate(9000)
with open(folder / "a", "ab") as file:
    file.write(b"!")
(folder / "b").mkdir()
shutil.copyfile(folder / "a", folder / "b" / "c")
(folder / "link").symlink_to("b")
(folder / "gone").mkdir()
(folder / "gone" / "d").touch()
shutil.rmtree(folder / "gone")
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_replayed_calls_make_the_same_tree(tmp_path):
    folder, trace = tmp_path / "out", tmp_path / "trace"
    folder.mkdir()
    crash_replay.record([sys.executable, "-c", WRITER, str(folder)], trace)
    replay = crash_replay.Replay(folder, crash_replay.Folder(), re.compile(b"-"))
    for call in crash_replay.calls(trace):
        replay.apply(*call)
    tree = crash_replay.crash(replay.tree, lambda names: len(names.pending), lambda: "whole")
    assert tree == {"a": (folder / "a").read_bytes(), "b": None, "b/c": (folder / "a").read_bytes(), "link": "b"}
    assert crash_replay.crash(replay.tree, lambda names: 0, lambda: "empty") == {}
    crash_replay.write_tree(tree, tmp_path)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["c"]


@pytest.mark.parametrize(
    ("how", "left"), [("whole", b"abcdef"), ("empty", b"ab"), ("zeros", b"ab\0\0\0\0"), ("half", b"abcd")]
)
def test_a_crash_keeps_what_was_synced(how, left):
    assert crash_replay.File(bytearray(b"abcdef"), b"ab").left(how) == left
