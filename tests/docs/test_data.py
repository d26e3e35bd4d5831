"""docs/data.md: each example's rows are written to its files, its command trains on them, and its block gives the same rows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import datasets
import pytest
import yaml
from helpers.models import save
from helpers.rows import write_lines
from helpers.runs import ROOT, finished
from helpers.tokenizers import write_qwen3_tokenizer
from omegaconf import OmegaConf

from benchmarks.tiny_text import WORDS
from finch.base.errors import UserError
from finch.config.instantiate import build, find_config
from finch.data.dataset import load_dataset
from finch.data.formats import FIELDS, detect

PAGE = (ROOT / "docs" / "data.md").read_text()
COMMAND = ["finch", "run", "auto", "model_dir=DIR"]


HEADINGS = re.findall(r"^### (.*)$", PAGE, re.MULTILINE)
FORMATS = HEADINGS[: HEADINGS.index("Columns of other names")]
ANCHORS = dict(re.findall(r"^\| \[(\w+)\]\(#(.*?)\)", PAGE, re.MULTILINE))


def format_of(heading: str) -> str:
    """The format that the page's table links to the heading."""
    anchor = re.sub(r"[^a-z ]", "", heading.lower()).replace(" ", "-")
    found = [name for name, linked in ANCHORS.items() if linked == anchor]
    return found[0] if found else "prompt_completion"


def blocks(heading: str) -> dict[str, str]:
    """The first block of each language under a heading of the third level. The formats have the first one's command, and its block but for
    ``format``."""
    section = PAGE.split(f"\n### {heading}\n", 1)[1].split("\n#", 1)[0]
    found = {language: text for language, text in reversed(re.findall(r"```(\w+)\n(.*?)```", section, re.DOTALL))}
    if heading in FORMATS[1:]:
        first = blocks(FORMATS[0])
        yaml_block = first["yaml"].replace("format: question_answer", f"format: {format_of(heading)}")
        found = {"bash": first["bash"], "yaml": yaml_block} | found
    return found


EXAMPLES = [heading for heading in HEADINGS if "bash" in blocks(heading)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen3 of two layers with its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    save("qwen3 tied", folder, vocab_size=320, max_position_embeddings=192)
    write_qwen3_tokenizer(folder, WORDS)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return build({"_component_": "finch.models.auto_tokenizer", "path": str(folder)}, "tokenizer")


def overrides_of(heading: str) -> list[str]:
    """What an example's command adds to `finch run auto model_dir=DIR`."""
    words = shlex.split(blocks(heading)["bash"])
    assert words[: len(COMMAND)] == COMMAND
    return words[len(COMMAND) :]


def write_files(heading: str, overrides: list[str]) -> list[str]:
    """Writes an example's rows, or those of the first one, into each file that its command names, in the working directory."""
    names = yaml.safe_load(next(text for text in overrides if text.startswith("data_files=")).partition("=")[2])
    names = [names] if isinstance(names, str) else names
    for name in names:
        rows = blocks(heading).get("json") or blocks("Question/answer")["json"]
        Path(name).write_text(
            rows * 4 if "validation" in blocks(heading)["yaml"] else rows
        )  # of ten, auto holds some out
    return names


def rows_of(config, key, tokenizer):
    samples = load_dataset(config, key, tokenizer)
    return [{name: list(map(int, values)) for name, values in samples[index].items()} for index in range(len(samples))]


def test_page_has_every_format():
    fields = {name: re.search(rf"^\| \[{name}\]\(#(.*?)\) \| (.*?) \|", PAGE, re.MULTILINE) for name in FIELDS}
    for name, found in fields.items():
        assert all(field in found[2] for field in FIELDS[name]), name
    assert {yaml.safe_load(blocks(heading)["yaml"])["dataset"]["format"] for heading in FORMATS} == set(FIELDS)
    assert all(len(blocks(heading)["json"].splitlines()) == 3 for heading in FORMATS)


@pytest.mark.slow
@pytest.mark.parametrize("heading", EXAMPLES)
def test_example_trains_on_the_rows_of_its_block(heading, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = overrides_of(heading)
    write_files(heading, overrides)
    config = yaml.safe_load(find_config("auto").read_text())
    config |= {"model_dir": str(folder), "device": "cpu", "epochs": 1, "max_steps_per_epoch": 2}
    done = finished(tmp_path, config, *overrides, "batch_size=1", "gradient_accumulation_steps=1")
    assert done.column("step") == [1, 2]
    assert "truncated" not in done.output
    written = OmegaConf.load(done.folder / "config.yaml")
    tokenizer = build(written.tokenizer, "tokenizer")
    block = OmegaConf.create(blocks(heading)["yaml"])
    assert block.dataset.get("format", written.dataset.format) == written.dataset.format
    for key in block:
        assert rows_of(block, key, tokenizer) == rows_of(written, key, tokenizer)


def test_files_of_different_formats_are_a_list(tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files("Packing", overrides_of("Packing"))
    write_files("Prompt and completion as messages", ["data_files=chats.jsonl"])
    text = re.search(r"```yaml\n(dataset:\n  - .*?)```", PAGE, re.DOTALL)[1]
    assert len(load_dataset(OmegaConf.create(text), "dataset", tokenizer)) == 6


def test_hub_block_names_the_repository(tokenizer, monkeypatch):
    table = datasets.Dataset.from_list([yaml.safe_load(blocks("Messages")["json"].splitlines()[0])])
    calls = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: calls.append((names, options)) or table)
    block = OmegaConf.create(blocks("Rows of the hub")["yaml"])
    assert len(load_dataset(block, "dataset", tokenizer)) == 1
    options = {"split": "train[:1000]", "data_files": None}
    assert calls == [(("HuggingFaceTB/smoltalk", "everyday-conversations"), options)]


@pytest.mark.parametrize("heading", ["TOFU", "SciKnowEval Chemistry L-3", "Galician Alpaca"])
def test_block_of_the_papers_task_splits_its_rows(heading, tokenizer, tmp_path):
    fields = {"answer": "b", "answerKey": "", "choices": {"text": [], "label": []}, "input": "", "output": "b"}
    fields |= {"domain": "Chemistry", "details": {"level": "L3"}}
    rows = [{"question": f"a {number}", "instruction": f"a {number}", **fields} for number in range(40)]
    block = OmegaConf.create(blocks(heading)["yaml"])
    block.dataset.data_files = write_lines(tmp_path / "rows.jsonl", *rows)
    sizes = [len(load_dataset(block, key, tokenizer)) for key in ("dataset", "dataset_validation")]
    assert sizes == ([36, 4] if heading == "TOFU" else [28, 2])
    share = re.search(rf"^\| {heading}.*?\| (\d+)%.*?\| (\d+)%", PAGE, re.MULTILINE)
    assert [int(share[1]), int(share[2])] == [100 * size // 40 for size in sizes]


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (['{"Frage": "a", "Antwort": "b"}'], "no known format"),
        (
            ['{"question": "a", "answer": "b"}'] * 2 + ['{"prompt": "a", "completion": "b"}'],
            "several formats in one file",
        ),
        (None, "a file that is missing, empty or a directory"),
    ],
)
def test_lines_of_mistakes_are_printed(rows, line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if rows is not None:
        Path("rows.json").write_text("\n".join(rows))
    with pytest.raises(UserError) as raised:
        detect("rows.json")
    printed = re.search(rf"^\| {line} \| `(.*)` \|$", PAGE, re.MULTILINE)[1]
    assert all(part in str(raised.value) for part in printed.split("..."))
