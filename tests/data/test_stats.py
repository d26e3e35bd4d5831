"""Statistics of rows: lengths, truncated rows and bad ones by their numbers."""

import pytest
import torch
from helpers import rows as rows_helper
from helpers.rows import openai, sharegpt
from helpers.tokenizers import HYBRID_TEMPLATE, write_qwen3_tokenizer

from finch.base.errors import UserError
from finch.data.dataset import Samples
from finch.data.stats import DatasetStats, RowCount, collect_stats, name_rows, validate_dataset
from finch.distributed.parallel import Parallel
from finch.models import auto_tokenizer

LONG, SHORT = "the bird and the tree " * 20, "the bird"


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
def test_truncated_rows_are_numbered(load, tokenizer, format, packed):
    texts = [SHORT, LONG, SHORT, SHORT, LONG, LONG, LONG]
    stats = collect_stats(load(*map(FORMATS[format], texts), packed=packed), 0, 1, tokenizer.max_seq_len)
    if format == "text" and packed:  # split across packs
        assert stats.truncated == RowCount()
        return
    assert (stats.num_rows, stats.truncated.number) == (7, 4)
    assert str(stats.truncated) == "rows 2, 5, 6, ..."
    assert (stats.lengths[3], stats.max_length) == (64, 64)
    assert stats.lengths[2] < 20


@pytest.mark.parametrize("packed", [False, True])
def test_ends_that_texts_have_already_are_said_at_a_runs_start(write, tmp_path, caplog, packed):
    """With the template's own they are learned twice. So are empty texts, which only `finch check` said."""
    write_qwen3_tokenizer(tmp_path, [LONG])
    tokenizer = auto_tokenizer(str(tmp_path), max_seq_len=64)
    templated = f"<|im_start|>user\n{SHORT}<|im_end|>\n<|im_start|>assistant\n"
    answers = (SHORT, f"{SHORT}<|im_end|>", " ", SHORT, f"{SHORT}<|im_end|>\n")
    rows = [*({"question": SHORT, "answer": each} for each in answers), {"question": templated, "answer": SHORT}]
    samples = rows_helper.load(tokenizer, write(*rows), packed=packed)
    validate_dataset(samples, 64, Parallel(torch.device("cpu")))
    said = "dataset: 3 of 6 rows have BOS, the end of a turn or an answer's header in their texts (row"
    assert said in caplog.text
    assert packed or "(rows 2, 5, 6)" in caplog.text
    empty = "dataset: 1 of 6 rows have an empty text (row 3); the model learns to answer or to write it"
    assert (empty in caplog.text) != packed


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("words", "thinking", "unasked"), [([LONG], False, [2, 3]), ([LONG], True, []), ([LONG, "\n\n"], False, [1, 2, 3])]
)
def test_answers_that_are_learned_after_another_prompt_are_named(write, tmp_path, words, thinking, unasked, packed):
    """Of a hybrid template an earlier answer has no thinking block. Generation starts after one token for two line breaks, where there is one."""
    template = HYBRID_TEMPLATE.replace("loop.last", "loop.last and not m.thinking")
    write_qwen3_tokenizer(tmp_path, words, template)
    tokenizer = auto_tokenizer(str(tmp_path), max_seq_len=64, thinking=thinking)
    asked, answer = ({"role": role, "content": SHORT} for role in ("user", "assistant"))
    thought = {**answer, "content": f"<think>\n{SHORT}\n</think>\n\n{SHORT}", "reasoning_content": SHORT}
    conversations = [asked, answer], [asked, answer, asked, answer], [asked, thought]
    samples = rows_helper.load(tokenizer, write(*({"messages": turns} for turns in conversations)), packed=packed)
    stats = collect_stats(samples, 0, 1)
    assert [row.number for row in stats.unasked.first] == unasked
    said = "rows learn an answer after other tokens than the model is asked with"
    assert any(said in note for note in stats.notes(64)) == bool(unasked)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_lengths_are_kept(load, packed):
    samples = load(*map(FORMATS["question_answer"], (SHORT, LONG) * 3), packed=packed)
    assert samples.lengths is None
    samples.rows = range(1, len(samples))
    validate_dataset(samples, None, Parallel(torch.device("cpu")))
    assert samples.lengths.tolist() == [0, *(len(samples[index]["tokens"]) for index in samples.rows)]


def test_truncated_text_of_torchtunes_dataset_is_counted(load, tokenizer):
    samples = load({"text": SHORT}, {"text": LONG}, _component_="torchtune.datasets.text_completion_dataset")
    stats = collect_stats(samples, 0, 1, tokenizer.max_seq_len)
    assert (stats.truncated.number, [row.number for row in stats.truncated.first]) == (1, [2])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split_by", ["order", "content"])
def test_held_out_rows_keep_their_numbers(load, tokenizer, split_by, packed):
    rows = [{"question": f"{SHORT} {number}", "answer": LONG if number in (3, 8) else SHORT} for number in range(1, 21)]
    options = {"validation_fraction": 0.5, "split_by": split_by, "packed": packed}
    parts = [load(*rows, part=part, **options) for part in ("train", "validation")]
    found = [row.number for part in parts for row in collect_stats(part, 0, 1, tokenizer.max_seq_len).truncated.first]
    assert sorted(found) == [3, 8]


def test_bad_rows_are_listed_with_reasons(load):
    bad = {"messages": openai(("user", SHORT), ("robot", SHORT))}
    samples = load(*[FORMATS["messages"](SHORT), bad] * 15, {"messages": None})
    with pytest.raises(
        UserError, match=r"15 rows .*, rows 2, 4, 6, .* them; `finch check` lists those with other faults$"
    ):
        validate_dataset(samples, None, Parallel(torch.device("cpu")))
    stats = collect_stats(samples, 0, 1)
    assert (stats.num_rows, stats.num_bad) == (15, 16)
    (reason, role), (_, null) = stats.bad.items()
    assert reason.startswith("its turn 2 has the unknown role 'robot'")
    assert (role.number, [row.number for row in role.first]) == (15, [2, 4, 6])
    assert (null.number, [row.number for row in null.first]) == (1, [31])
    last = collect_stats(samples, 30, 31)
    assert list(last.bad) == ["its field 'messages' is missing or null"]
    for ranks in (2, 3):
        shares = (collect_stats(samples, rank, ranks) for rank in range(ranks))
        assert sum(shares, DatasetStats()) == stats


def test_rows_of_several_files_are_named_with_their_file(load, write, tokenizer):
    files = [write(*[FORMATS["question_answer"](LONG)] * 2, name=f"{name}.jsonl") for name in "ab"]
    stats = collect_stats(load(data_files=files), 0, 1, tokenizer.max_seq_len)
    names = str(stats.truncated)
    assert names == f"row 1 of {files[0]}, row 2 of {files[0]}, row 1 of {files[1]}, ..."
    assert name_rows(stats.truncated.first[:1], 1) == "row 1"


def test_digest_is_what_earlier_runs_saved():
    """Checkpoints compare it. The expected value was printed by finch 0.1 before lengths and row numbers were collected."""
    rows = [{"tokens": [1, 5, 6, 2], "labels": [-100, -100, 6, 2]}, {"tokens": [1, 7, 2], "labels": [-100, 7, 2]}]
    assert f"{collect_stats(Samples(rows, 'dataset', 'rows'), 0, 1).digest:016x}" == "9f8c7296794eddc4"
