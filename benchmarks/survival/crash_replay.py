"""Power cuts: replays what a killed and resumed run has asked of the file system, and stops anywhere.

strace records the system calls of a small run. Any prefix of them is a crash. What is on the disk then is what was synced, and of the rest
whatever POSIX allows: names of each folder up to any point of their order, and files with all of their data, none, zeros, or half. Each
different tree is judged by the code that a resume reads it with; some are resumed to their end and compared with the unbroken run.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import itertools
import logging
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import yaml

from benchmarks import tiny_job, tiny_text
from benchmarks.survival.same_run import differences
from finch import run_files
from finch.checkpoint.reader import latest_valid, list_checkpoints, read_state
from finch.distributed.parallel import Parallel
from finch.errors import UserError
from finch.log import logger
from finch.weights.files import is_whole

CALLS = (
    "openat,open,creat,write,pwrite64,writev,lseek,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,symlink,symlinkat,"
    "link,linkat,ftruncate,fsync,fdatasync,sendfile,copy_file_range"
)
EPOCHS, ROWS, KILL_AT = 2, 46, 14  # 12 steps of 4 an epoch
CONTENTS = ("whole", "empty", "zeros", "half")
"""What is left of a file's data that was not synced."""
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
_SAID = re.compile(rb"saved the state of step (\d+)|saved \S*/(epoch_\d+) in")


# The file system: folders map names to nodes; both have what is on the disk for certain.


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""

    def left(self, how: str) -> bytes:
        data = bytes(self.data)
        if data == self.synced or how == "whole":
            return data
        kept = len(self.synced) if data.startswith(self.synced) else 0
        rest = {"empty": b"", "zeros": bytes(len(data) - kept), "half": data[kept : (kept + len(data)) // 2]}[how]
        return data[:kept] + rest


@dataclass
class Link:
    target: str


@dataclass
class Folder:
    """``pending``: changes of names since the folder was synced, each from a name to its node or None."""

    names: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)
    pending: list[dict[str, Any]] = field(default_factory=list)

    def change(self, **changes: Any) -> None:
        self.pending.append(changes)
        _apply(self.names, changes)

    def sync(self) -> None:
        self.synced, self.pending = dict(self.names), []

    def left(self, number: int) -> dict[str, Any]:
        """The names on the disk if ``number`` of the pending changes are."""
        names = dict(self.synced)
        for changes in self.pending[:number]:
            _apply(names, changes)
        return names


def _apply(names: dict[str, Any], changes: Mapping[str, Any]) -> None:
    for name, node in changes.items():
        names.pop(name, None)
        if node is not None:
            names[name] = node


Tree = dict[str, Any]
"""A path to a file's bytes, a link's target as text, or None for a folder."""


def crash(folder: Folder, names: Callable[[Folder], int], content: Callable[[], str], path: str = "") -> Tree:
    """What is on the disk after a crash."""
    tree: Tree = {}
    for name, node in sorted(folder.left(names(folder)).items()):
        where = f"{path}{name}"
        if isinstance(node, Folder):
            tree |= {where: None, **crash(node, names, content, f"{where}/")}
        else:
            tree[where] = node.target if isinstance(node, Link) else node.left(content())
    return tree


def crashes(root: Folder, rng: random.Random) -> Iterator[Tree]:
    """All names with each content; no name that was not synced; and two samples of what else POSIX allows."""
    for how in CONTENTS:
        yield crash(root, lambda folder: len(folder.pending), itertools.repeat(how).__next__)
    yield crash(root, lambda folder: 0, lambda: "empty")
    for _ in range(2):
        yield crash(root, lambda folder: rng.randint(0, len(folder.pending)), lambda: rng.choice(CONTENTS))


def write_tree(tree: Tree, folder: Path) -> None:
    for name, content in tree.items():
        path = folder / name
        if content is None:
            path.mkdir()
        elif isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)


def digest(tree: Tree) -> str:
    return hashlib.blake2b(repr(sorted(tree.items(), key=lambda item: item[0])).encode(), digest_size=16).hexdigest()


# From strace's lines to changes of the file system.


class Replay:
    """Applies recorded calls below ``root`` one by one; ``said``: what the run has said it has saved, steps and epochs' folders."""

    def __init__(self, root: Path) -> None:
        self._root, self.tree = str(root) + "/", Folder()
        self._descriptors: dict[str, list[Any]] = {}  # descriptor: file, offset
        self.said: list[int | str] = []

    def apply(self, call: str, arguments: list[str], result: int) -> bool:
        """Returns whether anything on the disk could have changed, or was said."""
        action = getattr(self, f"_{re.sub(r'(at2?|64)$', '', call)}", None)
        if result < 0 or action is None:
            return False
        return bool(action(arguments, result))

    def _node(self, path: str) -> tuple[Folder, str] | None:
        """The folder and the name there of a path below the root."""
        if not path.startswith(self._root):
            return None
        folder: Any = self.tree
        *parts, name = path[len(self._root) :].split("/")
        for part in parts:
            folder = folder.names[part]
        return folder, name

    def _open(self, arguments: list[str], result: int) -> bool:
        found = self._node(_path(arguments[:2]))
        self._descriptors.pop(str(result), None)
        if found is None:
            return False
        folder, name = found
        flags, has_changed = arguments[2], False
        if name not in folder.names:
            assert "O_CREAT" in flags, name
            folder.change(**{name: File()})
            has_changed = True
        node = folder.names[name]
        if isinstance(node, File):
            if "O_TRUNC" in flags and node.data:
                node.data, has_changed = bytearray(), True
            self._descriptors[str(result)] = [node, len(node.data) if "O_APPEND" in flags else 0]
        return has_changed

    def _file(self, argument: str) -> list[Any] | None:
        number, _, path = argument.partition("<")
        return self._descriptors.get(number) if _text(path).startswith(self._root) else None

    def _put(self, opened: list[Any], data: bytes, offset: int | None = None) -> bool:
        file, place = opened[0], opened[1] if offset is None else offset
        file.data[place:place] = bytes(max(0, place - len(file.data)))  # a hole
        file.data[place : place + len(data)] = data
        if offset is None:
            opened[1] += len(data)
        return bool(data)

    def _write(self, arguments: list[str], result: int) -> bool:
        data = _bytes(arguments[1])[:result]
        opened = self._file(arguments[0])
        if opened is not None:
            return self._put(opened, data)
        before = len(self.said)
        if arguments[0].split("<")[0] in ("1", "2"):
            self.said += [int(step) if step else name.decode() for step, name in _SAID.findall(data)]
        return len(self.said) > before

    def _pwrite(self, arguments: list[str], result: int) -> bool:
        opened = self._file(arguments[0])
        return opened is not None and self._put(opened, _bytes(arguments[1])[:result], int(arguments[3]))

    def _writev(self, arguments: list[str], result: int) -> bool:
        opened = self._file(arguments[0])
        parts = re.findall(r'iov_base="([^"]*)"', ",".join(arguments[1:]))
        return opened is not None and self._put(opened, b"".join(map(_bytes, parts))[:result])

    def _sendfile(self, arguments: list[str], result: int) -> bool:
        opened = self._file(arguments[0])
        if opened is None:
            return False
        source = Path(_text(arguments[1].partition("<")[2]))
        start = int(re.findall(r"\d+", arguments[2])[0])
        return self._put(opened, source.read_bytes()[start : start + result])

    def _lseek(self, arguments: list[str], result: int) -> bool:
        opened = self._file(arguments[0])
        if opened is not None:
            opened[1] = result
        return False

    def _ftruncate(self, arguments: list[str], result: int) -> bool:
        opened = self._file(arguments[0])
        if opened is None:
            return False
        file, length = opened[0], int(arguments[1])
        file.data[length:] = bytes(max(0, length - len(file.data)))
        return True

    def _fsync(self, arguments: list[str], result: int) -> bool:
        path = _text(arguments[0].partition("<")[2])
        opened = self._file(arguments[0])
        if opened is not None:
            opened[0].synced = bytes(opened[0].data)
        elif f"{path}/" == self._root:
            self.tree.sync()
        elif (found := self._node(path)) is not None:
            node = found[0].names[found[1]]
            if isinstance(node, File):  # opened for reading
                node.synced = bytes(node.data)
            else:
                node.sync()
        return True

    _fdatasync = _fsync

    def _mkdir(self, arguments: list[str], result: int) -> bool:
        found = self._node(_path(arguments))
        if found is None:
            return False
        found[0].change(**{found[1]: Folder()})
        return True

    def _unlink(self, arguments: list[str], result: int) -> bool:
        found = self._node(_path(arguments))
        if found is None:
            return False
        found[0].change(**{found[1]: None})
        return True

    _rmdir = _unlink

    def _symlink(self, arguments: list[str], result: int) -> bool:
        found = self._node(_path(arguments[1:]))
        if found is None:
            return False
        found[0].change(**{found[1]: Link(_text(arguments[0]))})
        return True

    def _rename(self, arguments: list[str], result: int) -> bool:
        half = 2 if len(arguments) >= 4 else 1
        source, target = self._node(_path(arguments[:half])), self._node(_path(arguments[half : 2 * half]))
        if source is None or target is None:
            assert source is target, arguments
            return False
        assert source[0] is target[0], "a rename into another folder"
        source[0].change(**{source[1]: None, target[1]: source[0].names[source[1]]})
        return True


def calls(trace: Path) -> Iterator[tuple[str, list[str], int]]:
    """The calls in the order in which they ended: name, arguments, result."""
    unfinished: dict[str, str] = {}
    with trace.open(encoding="ascii", errors="replace") as lines:
        for line in lines:
            line = line.rstrip("\n")
            process = line.partition(" ")[0]
            if line.endswith(" <unfinished ...>"):
                unfinished[process] = line.removesuffix(" <unfinished ...>")
                continue
            if (resumed := re.match(r"\d+ +<\.\.\. \w+ resumed>(.*)", line)) and process in unfinished:
                line = unfinished.pop(process) + resumed[1]
            if match := _CALL.match(line):
                yield match[2], re.split(r", (?![^\[{]*[\]}])", match[3]), int(match[4])


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.strip('."').replace("\\x", ""))


def _text(text: str) -> str:
    return _bytes(text.strip('">')).decode()


def _path(arguments: list[str]) -> str:
    """Of a path that is alone, or relative to a descriptor before it."""
    if len(arguments) == 1 or not arguments[1].startswith('"'):
        return _text(arguments[0])
    path = _text(arguments[1])
    return path if path.startswith("/") else f"{_text(arguments[0].partition('<')[2])}/{path}"


# The run.


def record(job: list[str], trace: Path, kill: Callable[[], bool] | None = None) -> None:
    """Runs a command under strace; kills it once ``kill`` is true."""
    command = ["strace", "-f", "-qq", "-y", "-xx", "-s", "1000000000", "-e", f"trace={CALLS}", "-o", str(trace), *job]
    environment = tiny_job.environment(tiny_job.ROOT, OMP_NUM_THREADS="1")
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            if kill is not None and kill():
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.send_signal(signal.SIGKILL)
                return
            time.sleep(0.001)


class CrashReplay:
    """
    Args:
        out: everything is written there.
        seed: of the sampled orders and of the choice of what is resumed.
    """

    def __init__(self, out: Path, seed: int) -> None:
        self._out, self._rng, self._run = out, random.Random(seed), out / "job" / "run"
        self._counts: Counter[str] = Counter()
        (out / "job").mkdir(parents=True)
        tiny_job.make_base(out / "base")
        tiny_text.make_rows(out / "rows.jsonl", ROWS, random.Random(1))
        checkpoint = {"every_n_steps": 8, "keep_last": 1, "async": False}
        dataset = tiny_job.instruct_dataset(out / "rows.jsonl")
        changes = {"epochs": EPOCHS, "checkpoint": checkpoint, "dataset_validation": dataset}
        config = tiny_job.make_config(out / "base", out / "rows.jsonl", self._run, **changes)
        (out / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def _command(self) -> list[str]:
        recipe = str(tiny_job.ROOT / "recipes" / "finch_full_finetune.py")
        return [sys.executable, recipe, "--config", str(self._out / "config.yaml"), "resume_from_checkpoint=auto"]

    def _lines(self) -> int:
        file = self._run / run_files.METRICS
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def record(self) -> Path:
        """The unbroken run, which the trace's end must be equal to."""
        record(self._command(), self._out / "trace.0", lambda: self._lines() >= KILL_AT)
        record(self._command(), self._out / "trace.1")
        reference = self._out / "reference"
        shutil.copytree(self._run, reference, symlinks=True)
        return reference

    def states(self) -> dict[str, tuple[Tree, list[int | str]]]:
        """Each different tree that a crash can leave, with what the run had said by then."""
        replay = Replay(self._out / "job")
        found: dict[str, tuple[Tree, list[int | str]]] = {}
        for number in range(2):
            for call, arguments, result in calls(self._out / f"trace.{number}"):
                if not replay.apply(call, arguments, result):
                    continue
                self._counts["points"] += 1
                for tree in crashes(replay.tree, self._rng):
                    key = digest(tree)
                    if key not in found or len(found[key][1]) < len(replay.said):
                        found[key] = tree, list(replay.said)
        end = crash(replay.tree, lambda folder: len(folder.pending), lambda: "whole")
        written = {str(path.relative_to(self._out / "job")) for path in (self._out / "job").rglob("*")}
        different = [
            name
            for name in written | set(end)
            if name not in end
            or (isinstance(end[name], bytes) and (self._out / "job" / name).read_bytes() != end[name])
        ]
        assert not different, f"the replayed calls do not make the run: {different}"
        return found

    def judge(self, tree: Tree, said: list[int | str]) -> str | None:
        """What is wrong with a state that a resume would find; None: nothing."""
        shutil.rmtree(self._out / "job")
        (self._out / "job").mkdir()
        write_tree(tree, self._out / "job")
        used, damages = latest_valid(list_checkpoints(self._run), Parallel(torch.device("cpu")))
        step = 0 if used is None else int(read_state(used)["step"])
        promised = max((each for each in said if isinstance(each, int)), default=0)
        if damages:
            return damages[0]
        if step < promised:
            return f"step {promised} was said to be saved, {step} would be resumed"
        broken = [name for name in said if isinstance(name, str) and not is_whole(self._run / name)]
        return f"{broken[0]} was said to be saved, and is not whole" if broken else None

    def resume(self, reference: Path) -> str | None:
        """Resumes the state that was judged last, in this process; its differences from the unbroken run."""
        import importlib
        from unittest import mock

        with mock.patch.object(sys, "argv", self._command()[1:]), contextlib.redirect_stderr(io.StringIO()):
            try:
                importlib.import_module("finch_full_finetune").recipe_main()
            except (SystemExit, UserError) as error:
                if getattr(error, "code", 1):
                    return f"{type(error).__name__} {error}"
        return next(iter(differences(self._run, reference)), None)


def main(out: Path, seed: int, resumed: int) -> list[str]:
    """Prints what was found; returns the failures."""
    if shutil.which("strace") is None:
        raise UserError(
            "crash-replay records a run with strace, which is not installed; install it (apt-get install strace)"
        )
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)  # as in the recorded run: sums are rounded in the same order
    replay = CrashReplay(out, seed)
    reference = replay.record()
    states = replay.states()
    failures = []
    for key, (tree, said) in states.items():
        if (problem := replay.judge(tree, said)) is not None:
            failures.append(f"state {key[:8]}: {problem}")
    print(
        f"crash-replay: {replay._counts['points']} points, {len(states)} different states, {len(failures)} wrong",
        flush=True,
    )
    chosen = random.Random(seed).sample(sorted(states), min(resumed, len(states)))
    for key in chosen:
        replay.judge(*copy.deepcopy(states[key]))
        if (problem := replay.resume(reference)) is not None:
            failures.append(f"state {key[:8]}, resumed: {problem}")
    print(f"crash-replay: {len(chosen)} states resumed to the end", flush=True)
    return failures
