"""Statistics of rows: lengths, truncated rows and bad ones by their numbers."""

import pytest
import torch
from helpers.rows import load, openai, sharegpt, write_lines
from helpers.runs import make_config
from omegaconf import OmegaConf
from torchtune.config import instantiate

from finch.data.dataset import Samples
from finch.data.stats import DatasetStats, collect_stats, name_rows, validate_dataset
from finch.distributed.parallel import Parallel
from finch.errors import UserError

TEXT = "torchtune.datasets.text_completion_dataset"
LONG, SHORT = "the bird and the tree " * 20, "the bird"


@pytest.fixture
def tokenizer(base_folder, rows_file, tmp_path):
    return instantiate(OmegaConf.create(make_config(base_folder, rows_file, tmp_path)).tokenizer)


FORMATS = {
    "question_answer": lambda text: {"question": SHORT, "answer": text},
    "prompt_completion": lambda text: {"prompt": SHORT, "completion": text},
    "instruction": lambda text: {"instruction": SHORT, "output": text},
    "messages": lambda text: {"messages": openai(("user", SHORT), ("assistant", text))},
    "sharegpt": lambda text: {"conversations": sharegpt(("user", SHORT), ("assistant", text))},
    "text": lambda text: {"text": text},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_truncated_rows_are_numbered(tokenizer, tmp_path, format, packed):
    texts = [SHORT, LONG, SHORT, SHORT, LONG, LONG, LONG]
    file = write_lines(tmp_path / "rows.jsonl", *map(FORMATS[format], texts))
    stats = collect_stats(load(tokenizer, file, packed=packed), 0, 1, tokenizer.max_seq_len)
    if format == "text" and packed:  # split across packs
        assert (stats.num_truncated, stats.truncated) == (0, [])
        return
    assert (stats.num_rows, stats.num_truncated) == (7, 4)
    assert name_rows(stats.truncated, stats.num_truncated) == "rows 2, 5, 6, ..."
    assert (stats.min_length, stats.median_length, stats.max_length) == (stats.lengths[0], 64, 64)
    assert stats.lengths[2] < 20


@pytest.mark.parametrize("packed", [False, True])
def test_rows_lengths_are_kept(tokenizer, tmp_path, packed):
    file = write_lines(tmp_path / "rows.jsonl", *({"question": SHORT, "answer": text} for text in (SHORT, LONG) * 3))
    samples = load(tokenizer, file, packed=packed)
    assert samples.lengths is None
    samples.rows = range(1, len(samples))
    validate_dataset(samples, None, Parallel(torch.device("cpu")))
    assert samples.lengths.tolist() == [0, *(len(samples[index]["tokens"]) for index in samples.rows)]


@pytest.mark.parametrize("component", ["finch.data.rows.rows_dataset", TEXT])
def test_truncated_text_is_counted(tokenizer, tmp_path, component):
    file = write_lines(tmp_path / "rows.jsonl", {"text": SHORT}, {"text": LONG})
    stats = collect_stats(load(tokenizer, file, _component_=component), 0, 1, tokenizer.max_seq_len)
    assert (stats.num_truncated, [row.number for row in stats.truncated]) == (1, [2])


def test_held_out_rows_keep_their_numbers(tokenizer, tmp_path):
    rows = [{"question": SHORT, "answer": LONG if number in (3, 8) else SHORT} for number in range(1, 21)]
    file = write_lines(tmp_path / "rows.jsonl", *rows)
    numbers = []
    for packed in (False, True):
        for part in ("train", "validation"):
            samples = load(tokenizer, file, part=part, validation_fraction=0.5, packed=packed)
            numbers += [row.number for row in collect_stats(samples, 0, 1, tokenizer.max_seq_len).truncated]
    assert sorted(numbers) == [3, 3, 8, 8]


def test_bad_rows_are_listed_with_reasons(tokenizer, tmp_path):
    good = {"messages": openai(("user", SHORT), ("assistant", SHORT))}
    bad = {"messages": openai(("user", SHORT), ("robot", SHORT))}
    samples = load(tokenizer, write_lines(tmp_path / "rows.jsonl", *[good, bad] * 15, {"messages": None}))
    with pytest.raises(UserError, match="row 2 of"):
        collect_stats(samples, 0, 1)
    stats = collect_stats(samples, 0, 1, keep_bad_rows=True)
    assert (stats.num_rows, stats.num_bad) == (15, 16)
    assert [entry.row.number for entry in stats.bad] == list(range(2, 21, 2))
    assert stats.bad[0].reason.startswith("its turn 2 has the unknown role 'robot'")
    last = collect_stats(samples, 30, 31, keep_bad_rows=True)
    assert last.bad[0].reason == "it has no field 'messages'"
    for ranks in (2, 3):
        shares = (collect_stats(samples, rank, ranks, keep_bad_rows=True) for rank in range(ranks))
        assert sum(shares, DatasetStats()) == stats


def test_rows_of_several_files_are_named_with_their_file(tokenizer, tmp_path):
    files = [write_lines(tmp_path / f"{name}.jsonl", *[FORMATS["question_answer"](LONG)] * 2) for name in "ab"]
    stats = collect_stats(load(tokenizer, files), 0, 1, tokenizer.max_seq_len)
    names = name_rows(stats.truncated, stats.num_truncated)
    assert names == f"row 1 of {files[0]}, row 2 of {files[0]}, row 1 of {files[1]}, ..."
    assert name_rows(stats.truncated[:1], 1) == "row 1"


def test_digest_is_what_earlier_runs_saved():
    """Checkpoints compare it. The expected value was printed by finch 0.1 before lengths and row numbers were collected."""
    rows = [{"tokens": [1, 5, 6, 2], "labels": [-100, -100, 6, 2]}, {"tokens": [1, 7, 2], "labels": [-100, 7, 2]}]
    assert f"{collect_stats(Samples(rows, 'dataset', 'rows'), 0, 1).digest:016x}" == "9f8c7296794eddc4"
