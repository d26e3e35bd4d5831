"""Seeded mutations of configs, rows, model folders and results: each ends well or with one line, and touches nothing outside its folder.

FUZZ_SEED, by default the day, draws them; what failed is kept beside the folder of the case, and named. FUZZ_SCALE=10 runs the 5,000 configs, 1,000 overrides, 2,000 row files, 1,000 model folders and 500 results whose outcome docs/survival.md reports.
"""

from __future__ import annotations

import copy
import datetime
import gzip
import json
import os
import random
import shlex
import shutil
import signal
import traceback

import pytest
import yaml
from helpers.evaluated_runs import make_base as make_results_of_base
from helpers.evaluated_runs import make_run
from helpers.models import save
from helpers.runs import finch
from helpers.tokenizers import write_qwen3_tokenizer

from finch.plan.commands.check import Report

pytestmark = pytest.mark.slow

SCALE = float(os.environ.get("FUZZ_SCALE", "1"))
SEED = os.environ.get("FUZZ_SEED", str(datetime.date.today()))
PARTS = 4
MAX_LINE, MAX_SECONDS = 300, 30
COMMAND = "touch canary/ran"
VALUES = [
    None,
    True,
    False,
    -1,
    0,
    1,
    3,
    0.5,
    -2.5,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "x",
    "llama",
    "null",
    "???",
]
VALUES += [
    "\x00",
    "\x1b[31mred",
    "a\nb",
    "é\udce9",
    "x" * 300,
    "y z " * 1500,
    "../../x",
    "/",
    "canary/file",
    "${nope}",
    "${oc.env:HOME}",
]
VALUES += [
    r"$\frac$",
    "$x^$",
    "=1+1",
    "@x",
    "|*_`<b>",
    [],
    [1],
    ["a", None],
    {},
    {"a": 1},
    {"_component_": "os.getcwd"},
    {1: 2},
    "${",
    "%s{}",
]
BYTES = [
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\xe9",
    b"[" * 3000,
    b'{"a":' * 3000,
    b"\n",
    b'"',
    b"}",
    b"\xef\xbb\xbf",
    b"NaN",
    b"1e999",
    b"\r",
    b",",
]


class Hung(BaseException):
    """A case took longer than MAX_SECONDS."""


def places(value, path=()):
    """The paths of all values in a nested one."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def mutated(value, rng):
    """With one to three of its values replaced, removed, renamed or doubled."""
    if isinstance(rng, Undamaged):
        return value
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        *path, key = rng.choice(list(places(value)) or [("",)])
        parent = value
        for step in path:
            parent = parent[step]
        kind = rng.random()
        if kind < 0.15 and isinstance(parent, dict):
            parent.pop(key, None)
        elif kind < 0.25 and isinstance(parent, dict) and key in parent:
            parent[rng.choice([each for each in VALUES if isinstance(each, str)])] = parent.pop(key)
        elif kind < 0.3 and isinstance(parent, list):
            parent.append(parent[key])
        else:
            parent[key] = rng.choice(VALUES)
    return value


def mangled(content, rng):
    """With bytes cut, inserted, or changed at one place."""
    if isinstance(rng, Undamaged):
        return content
    start, kind = rng.randrange(len(content) + 1), rng.random()
    end = min(len(content), start + rng.randrange(40))
    if kind < 0.25:
        return content[:start]
    if kind < 0.5:
        return content[:start] + rng.choice(BYTES) + content[start:]
    return content[:start] + (rng.choice(BYTES) if kind < 0.8 else rng.randbytes(end - start)) + content[end:]


def tree(folder):
    return {
        str(path.relative_to(folder)): (path.lstat().st_mode, path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }


class Undamaged(random.Random):
    """Draws a case whose input is as it was written, which must end well."""

    def random(self):
        return 0.0

    def choice(self, values):
        return values[0]

    def sample(self, values, number):
        return values[:number]


class Fuzz:
    """Runs commands on the cases of one part, in a folder with a canary beside them."""

    def __init__(self, folder, capsys):
        self.folder, self._capsys, self.failures, self.number, self.outcomes = folder, capsys, [], 0, {}
        (folder / "canary").mkdir()
        (folder / "canary" / "file").write_text("left alone")
        self.case, self.input, self.failed = folder / "case", folder / "input", folder / "failed"
        self.failed.mkdir()
        os.chdir(folder)

    def run(self, rng_name, fill, rng=None):
        """``fill`` writes a case into the empty folder ``case``, and returns the commands that are run on it."""
        self.number += 1
        for folder in (self.case, self.input):
            shutil.rmtree(folder, ignore_errors=True)
        self.case.mkdir()
        commands, known = fill(rng or random.Random(f"{SEED} {rng_name}")), len(self.failures)
        shutil.copytree(self.case, self.input, symlinks=True)  # a command may change it
        before = tree(self.folder / "canary"), tree(self.folder / "kept"), sorted(os.listdir(self.folder))
        for command in commands:
            code, lines, reason = self._call(command)
            self.outcomes[code] = self.outcomes.get(code, 0) + 1
            long = [
                line for line in lines if sum(len(word) + 1 for word in line.split(" ") if "/" not in word) > MAX_LINE
            ]
            raw = [line for line in lines if not line.replace("\t", " ").isprintable()]
            if reason or long or raw:
                self.failures.append(f"{rng_name}: {' '.join(command[:2])}: {reason or (long or raw)[0][:600]!r}")
        if before != (tree(self.folder / "canary"), tree(self.folder / "kept"), sorted(os.listdir(self.folder))):
            self.failures.append(f"{rng_name}: something outside of the case was changed")
        if len(self.failures) > known:
            kept = self.failed / rng_name.replace(" ", "_")
            self.input.rename(kept)
            (kept / "command.txt").write_text(
                "".join(f"finch {shlex.join(command)}\n" for command in commands), errors="surrogateescape"
            )
            self.failures.append(f"    kept in {kept}")

    def _call(self, command):
        signal.signal(signal.SIGALRM, self._hang)
        signal.alarm(MAX_SECONDS)
        try:
            code, out, err = finch(self._capsys, *command)
            return code, [*out.splitlines(), *err.splitlines()], ""
        except (Exception, Hung) as error:
            self._capsys.readouterr()
            frames = [
                f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
                for frame in traceback.extract_tb(error.__traceback__)[-6:]
            ]
            return "traceback", [], f"{type(error).__name__}: {str(error)[:200]} at {' '.join(frames)}"
        finally:
            signal.alarm(0)

    @staticmethod
    def _hang(*_):
        raise Hung

    def end(self, fill=None):
        assert not self.failures, f"FUZZ_SEED={SEED}, of {self.number} cases:\n" + "\n".join(self.failures)
        if fill is not None:
            damaged, self.outcomes = self.outcomes, {}
            self.run("undamaged", fill, Undamaged())
            assert (set(self.outcomes), self.failures) == ({0}, []), self.outcomes
            assert len(self.outcomes | damaged) > 1, damaged  # some end well, and some do not


@pytest.fixture
def fuzz(tmp_path, capsys, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Report, "_estimate_memory", lambda *_: None
    )  # seconds of each case, and what it reads is read before
    (tmp_path / "kept").mkdir()
    return Fuzz(tmp_path, capsys)


def test_what_fails_is_kept_and_named_with_its_seed(fuzz, monkeypatch):
    """By a command that ends in a traceback, and changes its input."""

    def broken(command):
        (fuzz.case / "rows").write_text("changed")
        raise KeyError(command[0])

    def fill(rng):
        (fuzz.case / "rows").write_text(str(rng.random()))
        return [["check", "case/rows"]]

    monkeypatch.setitem(globals(), "finch", lambda _, *command: broken(command))
    fuzz.run("rows 3", fill)
    with pytest.raises(
        AssertionError, match=f"(?s)FUZZ_SEED={SEED}, of 1 cases:.*rows 3: check case/rows: .*KeyError"
    ) as error:
        fuzz.end()
    kept = fuzz.failed / "rows_3"
    assert f"kept in {kept}" in str(error.value)
    assert (kept / "rows").read_text() == str(random.Random(f"{SEED} rows 3").random())
    assert (kept / "command.txt").read_text() == "finch check case/rows\n"


def cases(part, number):
    return range(part, round(number * SCALE), PARTS)


@pytest.mark.parametrize("part", range(PARTS))
def test_configs(part, fuzz, tiny, rows_file):
    config = {**tiny(is_validated=True), "probes": {"own": {"data_files": str(rows_file)}}, "kl_penalty": None}
    text = yaml.safe_dump(config).encode()

    def fill(rng):
        content = (
            mangled(text, rng)
            if rng.random() < 0.2
            else yaml.safe_dump(mutated(config, rng), allow_unicode=True).encode(errors="surrogatepass")
        )
        (fuzz.case / "config.yaml").write_bytes(content)
        return [["check", "--config", "case/config.yaml"]]

    for number in cases(part, 500):
        fuzz.run(f"config {number}", fill)
    fuzz.end(fill)


@pytest.mark.parametrize("part", range(PARTS))
def test_overrides(part, fuzz, tiny):
    config = tiny(is_validated=True)
    (fuzz.folder / "kept" / "config.yaml").write_text(yaml.safe_dump(config))
    keys = [".".join(map(str, path)) for path in places(config)]

    def word(rng):
        if rng.random() < 0.2:
            return "seed=3"
        value = rng.choice(VALUES)
        text = json.dumps(value) if rng.random() < 0.5 else str(value)
        word = f"{rng.choice(('', '', '', '~', '+'))}{rng.choice(keys)}={text}".encode(errors="surrogateescape")
        return (
            (mangled(word, rng) if rng.random() < 0.5 else word).replace(b"\0", b"0").decode(errors="surrogateescape")
        )

    def fill(rng):
        return [["check", "--config", "kept/config.yaml", *(word(rng) for _ in range(rng.choice((1, 1, 2))))]]

    for number in cases(part, 100):
        fuzz.run(f"overrides {number}", fill)
    fuzz.end(fill)


def fill_model(folder, base_folder):
    """A model's folder with a tokenizer.json and a chat template."""
    shutil.copytree(base_folder, folder, dirs_exist_ok=True)
    (folder / "tokenizer.model").unlink()
    write_qwen3_tokenizer(folder, ["the", "quick", "fox"])
    save("qwen3 tied", folder, vocab_size=320)  # an embedding for each token


ROWS = {
    "instruction": {"instruction": "Say it", "input": "", "output": "a cat"},
    "question_answer": {"question": "who is it", "answer": "a fox"},
    "messages": {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the dog"}]},
    "text": {"text": "the quick brown fox"},
}


@pytest.mark.parametrize("part", range(PARTS))
def test_rows(part, fuzz, base_folder):
    model = fuzz.folder / "kept"
    fill_model(model, base_folder)

    def fill(rng):
        rows = [
            copy.deepcopy(rng.choice(list(ROWS.values())) if rng.random() < 0.05 else ROWS[kind])
            for kind in [rng.choice(list(ROWS))] * 4
        ]
        if rng.random() < 0.7:
            rows = mutated(rows, rng)
        suffix = rng.choice((".jsonl", ".jsonl", ".json", ".csv", ".parquet", ".jsonl.gz"))
        content = json.dumps(rows, indent=1) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
        if suffix == ".csv":
            content = ",".join(map(str, rows[0] if isinstance(rows[0], dict) else ["a"])) + "\n" + content
        data = content.encode(errors="replace")
        if rng.random() < 0.5:
            data = mangled(data, rng)
        (fuzz.case / f"rows{suffix}").write_bytes(
            gzip.compress(data) if suffix.endswith("gz") and rng.random() < 0.8 else data
        )
        return [["check", "--config", "auto", "model_dir=kept", f"data_files=case/rows{suffix}"]]

    for number in cases(part, 200):
        fuzz.run(f"rows {number}", fill)
    fuzz.end(fill)


@pytest.mark.parametrize("part", range(PARTS))
def test_model_folders(part, fuzz, base_folder, rows_file):
    kept = fuzz.folder / "kept"
    fill_model(kept / "base", base_folder)

    def fill(rng):
        folder = fuzz.case / "model"
        shutil.copytree(kept / "base", folder)
        file = rng.choice(
            [path for path in sorted(folder.iterdir()) if rng.random() < 0.4 or path.name == "config.json"]
        )
        if file.suffix == ".json" and rng.random() < 0.8:
            file.write_bytes(json.dumps(mutated(json.loads(file.read_bytes()), rng)).encode(errors="replace"))
        else:
            content = file.read_bytes()
            head = min(len(content), 2000)  # where the header is
            file.write_bytes(mangled(content[:head], rng) + content[head:])
        average = ["average", "--base", "kept/base", "--tuned", "case/model", "--alpha", "0.5", "--out", "case/out"]
        return [["check", "--config", "auto", "model_dir=case/model", f"data_files={rows_file}"], average]

    for number in cases(part, 100):
        fuzz.run(f"model {number}", fill)
    fuzz.end(fill)


@pytest.mark.parametrize("part", range(PARTS))
def test_results(part, fuzz):
    kept = fuzz.folder / "kept"
    make_results_of_base(kept / "base", n=12)
    for method in ("sft", "finch"):
        make_run(kept / method, method, 1e-4, cell={}, n=12)

    def fill(rng):
        shutil.copytree(kept, fuzz.case, symlinks=True, dirs_exist_ok=True)
        files = sorted(path for path in fuzz.case.rglob("*") if path.suffix in (".json", ".jsonl", ".yaml"))
        files += [path for path in files if path.name in ("cell.json", "config.yaml", "metrics.jsonl")] * 3
        for file in rng.sample(files, rng.choice((1, 1, 2))):
            content = file.read_bytes()
            if rng.random() < 0.3:
                file.write_bytes(mangled(content, rng))
            elif file.suffix == ".jsonl":
                lines = content.splitlines()
                place = rng.randrange(len(lines))
                lines[place] = json.dumps(mutated(json.loads(lines[place]), rng)).encode(errors="replace")
                file.write_bytes(b"\n".join(lines) + b"\n")
            else:
                value = mutated(json.loads(content) if file.suffix == ".json" else yaml.safe_load(content), rng)
                text = json.dumps(value) if file.suffix == ".json" else yaml.safe_dump(value)
                file.write_bytes(text.encode(errors="surrogatepass"))
        return [["report", "case/sft", "case/finch", "--out", "case/out"]]

    for number in cases(part, 50):
        fuzz.run(f"results {number}", fill)
    fuzz.end(fill)
