"""The commands that read a run of somebody else's, on one in which each value and each file was replaced in turn by something hostile: what they open for
writing, connect to, start and import is recorded, and is what docs/security.md lists.

The quick tests take a few values of the config through its readers; those with -m slow a share, FOREIGN_SHARE, of all values and files through each
command, drawn by FOREIGN_SEED.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import itertools
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.evaluated_runs import make_base as make_results
from helpers.evaluated_runs import write_suites
from helpers.evaluation import write_data_root
from helpers.runs import finch, validated

from finch.base.errors import UserError
from finch.evaluation.average import average, read_config
from finch.evaluation.chat import _UNUSED
from finch.evaluation.choice import Choice
from finch.evaluation.model_folders import training_questions
from finch.study.report.runs import read_run

SECRET, CANARY = "FINCH_TEST_SECRET", "finch_canary"
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGES = {
    "os.mkdir",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.utime",
}
STARTS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"}


class Recorder:
    """What this process does, while it is on: where it writes, and what it may not do at all."""

    def __init__(self) -> None:
        self.is_on, self.written, self.refused = False, list[str](), list[str]()
        sys.addaudithook(self._see)

    def _see(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.is_on:
            return
        if event == "open" and isinstance(args[0], (str, bytes)) and int(args[2] or 0) & WRITES:
            self.written.append(os.path.realpath(os.fsdecode(args[0])))
        elif event in CHANGES:
            paths = [os.fsdecode(each) for each in args[:2] if isinstance(each, (str, bytes)) and event != "os.symlink"]
            if event in ("os.remove", "os.rmdir") and args[1] >= 0:  # relative to an open folder
                paths = [os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), paths[0])]
            for folder, name in map(os.path.split, paths):  # a link itself is changed, not where it leads
                self.written.append(os.path.normpath(os.path.join(os.path.realpath(folder), name)))
        elif event.startswith("socket.") and event not in ("socket.__new__", "socket.gethostname"):
            self.refused.append(f"{event} {args[1:]}")
        elif event == "subprocess.Popen" and "chat_environment" not in str(args[1]):
            self.refused.append(f"{event} {args[1]}")
        elif event in STARTS - {"subprocess.Popen"} or (event == "import" and CANARY in str(args[0])):
            self.refused.append(f"{event} {args[:1]}")


@pytest.fixture(scope="session")
def recorder():
    return Recorder()


class Hung(BaseException):
    """A case took longer than half a minute."""


@pytest.fixture(scope="module")
def template(base_folder, rows_file, trained, tmp_path_factory) -> Path:
    """A folder with a run, its base and rows, everything that the commands read of it, and nothing outside of it."""
    from benchmarks.tiny_job import make_config as tiny

    folder = tmp_path_factory.mktemp("template")
    own = {"kind": "self", "data_files": str(rows_file), "rows": 3, "max_new_tokens": 4}
    facts = {"data_files": str(rows_file), "rows": 3, "kind": "question_answer"}
    config = validated(tiny(base_folder, rows_file, folder / "run", probes={"own": own, "facts": facts}))
    shutil.copytree(trained(config).folder, folder / "run", symlinks=True)
    shutil.copytree(base_folder, folder / "run" / "base")
    shutil.copy(rows_file, folder / "run" / "rows.jsonl")
    text = (folder / "run" / "config.yaml").read_text()
    text = text.replace(str(base_folder), "RUN/base").replace(str(rows_file), "RUN/rows.jsonl")
    (folder / "run" / "config.yaml").write_text(text)
    make_results(folder / "results", n=20)
    options = {"new": 0.5, "shift": -0.1, "rng": random.Random(0), "weights": "f" * 64, "n": 20}
    write_suites(folder / "run" / "evaluation", base="../../results", suites=("knowledge",), **options)
    shutil.copytree(folder / "run" / "epoch_0", folder / "run" / "average" / "model")
    for name in ("README.md", "front.csv", "front.json", "front.png"):
        (folder / "run" / "average" / name).write_text("{}")
    (folder / "run" / "cell.json").write_text('{"values": {}, "task": "knowledge", "status": "finished"}')
    shutil.rmtree(folder / "run" / "checkpoints")
    write_data_root(folder / "data", 4)
    return folder


class World:
    """A copy of the run in a folder of its own, and outside of it what nobody may touch."""

    def __init__(self, folder: Path, template: Path) -> None:
        self.folder, self.run, self.outside = folder, folder / "run", folder / "outside"
        shutil.copytree(template, folder, symlinks=True, dirs_exist_ok=True)
        text = (self.run / "config.yaml").read_text()
        (self.run / "config.yaml").write_text(text.replace("RUN/", f"{self.run}/"))
        self.outside.mkdir()
        for name in ("secret.json", "model/secret.json"):
            (self.outside / name).parent.mkdir(exist_ok=True)
            (self.outside / name).write_text('{"secret": 1}')
        for place in (self.folder, self.run):
            (place / f"{CANARY}.py").write_text(f"open({str(self.outside / 'ran')!r}, 'w')\ndef run(*_, **__): pass\n")
        self.before = self._content()

    def _content(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in self.outside.rglob("*") if path.is_file()}

    def check(self, recorder: Recorder, case: str) -> None:
        """Nothing outside the lists has happened, and nothing of outside was copied into the run."""
        assert recorder.refused == [], case
        allowed = [self.run / "average", self.run / "evaluation", self.run / ".lock", self.folder / "out"]
        allowed += [
            Path.home() / ".cache",
            Path("/dev/null"),
            *map(Path, os.environ.get("HF_HOME", "/dev/null").split()),
        ]
        temporary = Path(tempfile.gettempdir()).resolve()
        others = [
            path
            for path in recorder.written
            if not any(Path(path).is_relative_to(each.resolve()) for each in allowed)
            and not path.startswith(f"{self.run}/own_answers_")
            and (Path(path).is_relative_to(self.folder) or not Path(path).is_relative_to(temporary))
            and path != str(self.run)
            and "__pycache__" not in path
        ]
        assert others == [], case
        assert self._content() == self.before, case
        for path in [*self.run.rglob("average/*"), *self.run.rglob("average/model/*"), *self.folder.glob("out/**/*")]:
            if path.is_file() and not path.resolve().is_relative_to(self.outside):
                assert b'"secret"' not in path.read_bytes(), (case, path)


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all values in a nested one."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*path, key)
        yield from places(value, (*path, key))


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    node = parent = copy.deepcopy(node)
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return node


def hostile_values(world: World) -> dict[str, Any]:
    os.mkfifo(world.folder / "pipe")
    (world.folder / "link").symlink_to(world.outside / "model")
    return {
        "resolver": f"${{oc.env:{SECRET}}}",
        "nested": f"${{oc.decode:'${{oc.env:{SECRET}}}'}}",
        "escaped": rf"\\${{oc.env:{SECRET}}}",
        "component": {"_component_": f"{CANARY}.run"},
        "in a list": [{"more": {"_component_": f"{CANARY}.run"}}],
        "system": {"_component_": "os.system", "command": f"touch {world.outside}/ran"},
        "name": f"{CANARY}.run",
        "key": {f"${{oc.env:{SECRET}}}": 1},
        "url": "http://127.0.0.1:9/x.jsonl",
        "chained": "simplecache::http://127.0.0.1:9/x.jsonl",
        "pipe": str(world.folder / "pipe"),
        "link": str(world.folder / "link"),
    }


@pytest.fixture
def world(template, tmp_path, monkeypatch):
    world = World(tmp_path / "world", template)
    monkeypatch.setenv(SECRET, "s3cret")
    monkeypatch.chdir(world.run)

    def hang(*_):
        raise Hung

    previous = signal.signal(signal.SIGALRM, hang)
    yield world
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


def recorded(recorder: Recorder, world: World, case: str, action: Any) -> None:
    """Does something that may end with a UserError alone, and checks the world after it."""
    recorder.written, recorder.refused, recorder.is_on = [], [], True
    signal.alarm(60)
    try:
        action()
    except UserError:
        pass
    except BaseException as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    finally:
        recorder.is_on = False
        signal.alarm(0)
    world.check(recorder, case)


def drawn() -> tuple[random.Random, float]:
    """Which cases are taken: others each day; and their share."""
    seed, share = (
        os.environ.get("FOREIGN_SEED", str(datetime.date.today())),
        float(os.environ.get("FOREIGN_SHARE", "0.05")),
    )
    print(f"FOREIGN_SEED={seed} FOREIGN_SHARE={share}")
    return random.Random(seed), share


@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_value_of_a_config(is_quick, world, recorder):
    """Each reader of a config, for values of it and one more beside each, and hostile values of each kind."""
    config = yaml.safe_load((world.run / "config.yaml").read_text())
    whole = list(places(config))
    whole += [(*path[:-1], "one_more") for path in whole if path[-1] == "_component_"] + [("one_more",)]
    kinds = list(hostile_values(world).items())

    def read_all() -> None:
        for read in (lambda: read_config(world.run, None, _UNUSED), lambda: read_config(world.run, None)):
            with contextlib.suppress(UserError):
                read()
        training_questions(world.run)
        read_run(world.run)

    cases = list(itertools.product(whole, kinds))
    rng, share = (random.Random(0), 0.01) if is_quick else drawn()
    for path, (kind, value) in rng.sample(cases, round(share * len(cases))):
        text = yaml.dump(replaced(config, path, value), Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper))
        (world.run / "config.yaml").write_text(text)
        recorded(recorder, world, f"{path}: {kind}", read_all)


@pytest.mark.slow
def test_every_value_and_every_file_through_every_command(world, template, recorder, capsys, tmp_path):
    rng, share = drawn()
    pristine = tmp_path / "pristine"
    shutil.copytree(world.run, pristine, symlinks=True)
    config = yaml.safe_load((world.run / "config.yaml").read_text())
    values, results = hostile_values(world), str(world.folder / "results")
    evaluated = [
        "evaluate",
        "--base",
        str(world.run / "base"),
        "--data-root",
        str(world.folder / "data"),
        "--limit",
        "2",
    ]
    evaluated += ["--suite", "forgetting", "--tasks", "hellaswag", "--out", str(world.folder / "out" / "evaluation")]
    commands = {
        "chat": ["chat", ".", "--prompt", "the bird", "--max-new-tokens", "3"],
        "average": ["average", ".", "--alpha", "0.5"],
        "evaluate": [*evaluated, "--tuned", str(world.run)],
        "report": ["report", str(world.run), "--base", results, "--out", str(world.folder / "out" / "report")],
    }
    files = [path.relative_to(pristine) for path in sorted(pristine.rglob("*")) if path.suffix != ".py"]
    cases: list[tuple[str, Any]] = [
        (f"{path}: {kind}", (path, value)) for path in places(config) for kind, value in values.items()
    ]
    cases += [
        (f"{path}: {kind}", (path, kind))
        for path in files
        for kind in ("link", "pipe", "pickle", "folder", "gone", "noise")
    ]
    finch(capsys, *commands["report"])  # fonts and modules that are read once
    failures = []
    for case, (place, value) in cases:
        for name, command in commands.items():
            if rng.random() >= (share / 8 if isinstance(place, tuple) else share):  # most values are refused alike
                continue
            shutil.rmtree(world.run)
            shutil.copytree(pristine, world.run, symlinks=True)
            os.chdir(world.run)
            if isinstance(place, tuple):
                (world.run / "config.yaml").write_text(yaml.safe_dump(replaced(config, place, value)))
            else:
                spoil(world, world.run / place, value)

            def act(command: list[str] = command) -> None:
                code, _, error = finch(capsys, *command)
                assert code in (0, 1, 2), error
                assert "Traceback" not in error
                assert error.count("finch: error:") == (code != 0), error

            try:
                recorded(recorder, world, f"finch {name}: {case}", act)
            except AssertionError as error:  # all of them at once, with the seed
                failures.append(str(error))
    assert not failures, "\n".join(failures)


class Pickle:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def spoil(world: World, path: Path, kind: str) -> None:
    is_folder = path.is_dir() and not path.is_symlink()
    if is_folder:
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if kind == "link":
        path.symlink_to(world.outside / ("model" if is_folder or path.name == "best" else "secret.json"))
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Pickle(world.outside / "ran")))
    elif kind == "folder":
        path.mkdir()
    elif kind == "noise":
        path.write_bytes(random.Random(str(path)).randbytes(300))


@pytest.mark.parametrize(
    "name", ["average", "average/front.json", "average/README.md", "average/front.png", "average/model"]
)
def test_an_average_follows_no_link(world, name, recorder):
    place = world.run / name
    spoil(world, place, "link")
    target = place.readlink()
    recorded(recorder, world, name, lambda: average(world.run, Choice(alpha=0.5)))
    assert sorted(path.name for path in target.iterdir()) == ["secret.json"] if target.is_dir() else target.is_file()


def test_no_side_file_is_taken_from_elsewhere(world, recorder):
    (world.run / "epoch_0" / "notes.json").symlink_to(world.outside / "secret.json")
    with pytest.raises(UserError, match="links files outside of it, which would go into the average"):
        average(world.run, Choice(alpha=0.5))
    (world.run / "epoch_0" / "notes.json").unlink()
    (world.run / "base" / "notes.json").symlink_to(world.outside / "secret.json")
    recorded(recorder, world, "base", lambda: average(world.run, Choice(alpha=0.5)))
