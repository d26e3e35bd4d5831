"""Power cuts: replays what a killed and resumed command has asked of the file system, and stops anywhere.

strace records the system calls of a small run, average, evaluation or sweep. Any prefix of them is a crash. What is on the disk then is what was synced, and of the rest
whatever POSIX allows: names of each folder up to any point of their order, and files with all of their data, none, zeros, or half. Each
different tree is judged by the code that continues from it; some are continued to their end and compared with an undisturbed start.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.survival.cases import Case, environment
from finch.base.errors import UserError
from finch.base.log import logger

CALLS = (
    "clone,clone3,fork,vfork,openat,open,creat,write,pwrite64,writev,lseek,rename,renameat,renameat2,unlink,unlinkat,mkdir,mkdirat,rmdir,symlink,symlinkat,"
    "link,linkat,ftruncate,fsync,fdatasync,sendfile,copy_file_range"
)
LOG = ".log"
"""Suffix of the files that are left out: nothing is continued from a log."""
CONTENTS = ("whole", "empty", "zeros", "half")
"""What is left of a file's data that was not synced."""
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\) += (-?\d+)")
_STARTED = re.compile(r"(\d+) .*(?:clone3?|v?fork)\b(.*) = (\d+)$")


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


def read_folder(path: Path) -> Folder:
    """A folder that is on the disk for certain."""
    folder = Folder()
    for each in path.iterdir():
        if each.is_symlink():
            folder.names[each.name] = Link(str(each.readlink()))
        elif each.is_dir():
            folder.names[each.name] = read_folder(each)
        else:
            folder.names[each.name] = File(bytearray(each.read_bytes()), each.read_bytes())
    folder.sync()
    return folder


Tree = dict[str, Any]
"""A path to a file's bytes, a link's target as text, or None for a folder."""


def crash(folder: Folder, names: Callable[[Folder], int], content: Callable[[], str], path: str = "") -> Tree:
    """What is on the disk after a crash."""
    tree: Tree = {}
    for name, node in sorted(folder.left(names(folder)).items()):
        where = f"{path}{name}"
        if name.endswith(LOG):
            continue
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
    """Applies recorded calls below ``root`` one by one.

    Args:
        tree: what is there before.
        promise: matches what processes print once something is on the disk for good.

    Attributes:
        said: the promises, each its first group that matched.
    """

    def __init__(self, root: Path, tree: Folder, promise: re.Pattern[bytes]) -> None:
        self._root, self.tree, self._promise = str(root) + "/", tree, promise
        self._descriptors: dict[tuple[str, str], list[Any]] = {}  # process and descriptor: file, offset
        self.said: list[str] = []

    def apply(self, process: str, call: str, arguments: list[str], result: int) -> bool:
        """Returns whether anything on the disk could have changed, or was said."""
        self._process = process
        action = getattr(self, f"_{re.sub(r'(at2?|64)$', '', call)}", None)
        if result < 0 or action is None:
            return False
        return bool(action(arguments, result))

    def _node(self, path: str) -> tuple[Folder, str] | None:
        """The folder and the name there of a path below the root."""
        path = path.rstrip("/")
        if not path.startswith(self._root):
            return None
        folder: Any = self.tree
        *parts, name = path[len(self._root) :].split("/")
        for part in parts:
            node = folder.names[part]
            folder = folder.names[node.target] if isinstance(node, Link) else node  # only best, next to its target
        return folder, name

    def _open(self, arguments: list[str], result: int) -> bool:
        found = self._node(_path(arguments[:2]))
        self._descriptors.pop((self._process, str(result)), None)
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
            self._descriptors[self._process, str(result)] = [node, len(node.data) if "O_APPEND" in flags else 0]
        return has_changed

    def _file(self, argument: str) -> list[Any] | None:
        number, _, path = argument.partition("<")
        if (found := self._node(_text(path))) is None:
            return None
        node = found[0].names.get(found[1])
        inherited = [node, len(node.data)] if isinstance(node, File) else None  # a log
        return self._descriptors.get((self._process, number), inherited)

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
            self.said += [match[match.lastindex or 0].decode() for match in self._promise.finditer(data)]
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
        node = source[0].names[source[1]]
        if source[0] is target[0]:
            source[0].change(**{source[1]: None, target[1]: node})
        else:  # POSIX lets a crash leave both names, or none
            source[0].change(**{source[1]: None})
            target[0].change(**{target[1]: node})
        return True


def calls(trace: Path, number: int = 0) -> Iterator[tuple[str, str, list[str], int]]:
    """The calls in the order in which they ended: process, name, arguments, result.

    Args:
        number: of the trace, so that another one's processes are others.
    """
    process_of: dict[str, str] = {}
    for line in _lines(trace):
        if match := _STARTED.match(line):
            process_of[match[3]] = match[1] if "CLONE_THREAD" in match[2] else match[3]
    for line in _lines(trace):
        if match := _CALL.match(line):
            process = match[1]
            while process_of.get(process, process) != process:
                process = process_of[process]
            yield f"{number} {process}", match[2], re.split(r", (?![^\[{]*[\]}])", match[3]), int(match[4])


def _lines(trace: Path) -> Iterator[str]:
    """Of finished calls; one that another process has interrupted in the trace is put together."""
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
            yield line


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


# The command.


def record(job: list[str], trace: Path, kill: Callable[[], bool] | None = None) -> None:
    """Runs a command under strace; kills it once ``kill`` is true."""
    command = ["strace", "-f", "-qq", "-y", "-xx", "-s", "1000000000", "-e", f"trace={CALLS}", "-o", str(trace), *job]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
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
        seed: of the sampled orders and of the choice of what is resumed.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self._case, self._rng = case, random.Random(seed)
        self.points = 0

    def record(self) -> None:
        """The command, killed half way and started again, then an undisturbed one, which makes the reference."""
        case = self._case
        case.reset()
        self._tree = read_folder(case.job)
        record(case.command(), case.out / "trace.0", case.is_half_done)
        record(case.command(), case.out / "trace.1")
        case.keep_reference()

    def states(self) -> dict[str, tuple[Tree, list[str]]]:
        """Each different tree that a crash can leave, with what the command had said by then."""
        case = self._case
        replay = Replay(case.job, self._tree, case.promise)
        found: dict[str, tuple[Tree, list[str]]] = {}
        contents: dict[bytes, bytes] = {}  # each once in memory
        for number in range(2):
            for call in calls(case.out / f"trace.{number}", number):
                if not replay.apply(*call):
                    continue
                self.points += 1
                for tree in crashes(replay.tree, self._rng):
                    key = digest(tree)
                    if key not in found or len(found[key][1]) < len(replay.said):
                        shared = {
                            name: contents.setdefault(content, content) if isinstance(content, bytes) else content
                            for name, content in tree.items()
                        }
                        found[key] = shared, list(replay.said)
        end = crash(replay.tree, lambda folder: len(folder.pending), lambda: "whole")
        written = {str(path.relative_to(case.job)) for path in case.job.rglob("*") if path.suffix != LOG}
        different = [
            name
            for name in written | set(end)
            if name not in end or (isinstance(end[name], bytes) and (case.job / name).read_bytes() != end[name])
        ]
        assert not different, f"the replayed calls do not make what was written: {different}"
        return found

    def judge(self, tree: Tree, said: list[str]) -> str | None:
        """What is wrong with a state that the command would find; None: nothing."""
        shutil.rmtree(self._case.job)
        self._case.job.mkdir()
        write_tree(tree, self._case.job)
        try:
            return self._case.wrong(said)
        except (UserError, ValueError, OSError) as error:
            return f"{type(error).__name__} {error}"

    def finish(self) -> str | None:
        """Continues from the state that was judged last; the first difference from the reference."""
        return self._case.finish() or next(iter(self._case.differences()), None)


def main(out: Path, cases: Sequence[type[Case]], seed: int, resumed: int) -> list[str]:
    """Prints what was found; returns the failures."""
    if shutil.which("strace") is None:
        raise UserError(
            "crash-replay records a run with strace, which is not installed; install it (apt-get install strace)"
        )
    logger.setLevel(logging.ERROR)
    torch.set_num_threads(1)  # as in the recorded run: sums are rounded in the same order
    failures = []
    for each in cases:
        replay = CrashReplay(each(out), seed)
        replay.record()
        states = replay.states()
        for key, state in states.items():
            if (problem := replay.judge(*state)) is not None:
                failures.append(f"{each.name}, state {key[:8]}: {problem}")
        print(
            f"crash-replay, {each.name}: {replay.points} points, {len(states)} different states, {len(failures)} wrong",
            flush=True,
        )
        number = (
            resumed if each.is_in_process else max(1, resumed // 10)
        )  # a start of its own takes ten seconds or more
        chosen = random.Random(seed).sample(sorted(states), min(number, len(states)))
        for key in chosen:
            replay.judge(*states[key])
            if (problem := replay.finish()) is not None:
                failures.append(f"{each.name}, state {key[:8]}, resumed: {problem}")
        print(f"crash-replay, {each.name}: {len(chosen)} states resumed to the end", flush=True)
    return failures
