"""`finch check --exact` on a small model whose files do not exist."""

import json
import re

import pytest
import torch
from helpers.runs import finch, make_config, write_config


@pytest.fixture
def estimate(tmp_path, capsys):
    """(exit code, report, errors) for changes of a good config; fails if a file is written."""

    def run(*arguments, **changes):
        absent = tmp_path / "absent"
        config = write_config(tmp_path / "config", make_config(absent, absent / "rows", tmp_path / "run", **changes))
        before = sorted(tmp_path.rglob("*"))
        result = finch(capsys, "check", "--exact", config, *arguments)
        assert sorted(tmp_path.rglob("*")) == before
        assert not torch.distributed.is_initialized()
        return result

    return run


def test_estimate_reports_memory_collectives_and_time(estimate):
    host = ("--launch-us", "1", "--collective-us", "1")
    rates = ("--matmul-tflops", "1e-3", "--bandwidth-gb-s", "1e-2", *host)
    code, out, _ = estimate("--gpus", "2", "--gpu-memory", "1", "--seq", "20", "--targets", "8", *rates)
    assert code == 0, out
    assert "2 ranks, weights divided over 2; fp32; computed on fake tensors" in out
    assert "19,616, all trained" in out
    assert "1 x 4 rows of 20 tokens with 8 targets on a rank: 76 tokens in the layers, 32 in the output layer" in out
    sizes = dict(re.findall(r"^ +([a-z ]+?) +([\d.]+) kB$", out, re.MULTILINE))
    assert float(sizes["optimizer states"]) == pytest.approx(78.5, abs=0.2)
    assert {"weights", "activations", "peak", "before the step"} <= set(sizes)
    assert re.search(r"all-gather +3 x", out)
    assert re.search(r"reduce-scatter +2 x", out)
    assert re.search(
        r"bound +(products|network): a step takes at least [\d.]+ s, and [\d.]+ s if nothing overlaps", out
    )
    assert "fits          into 1 GB" in out


def test_estimate_takes_the_longest_row_of_the_configs_files(base_folder, rows_file, tmp_path, capsys):
    config = write_config(tmp_path, make_config(base_folder, rows_file, tmp_path / "run"))
    (checked, shown), exact = finch(capsys, "check", config)[:2], finch(capsys, "check", "--exact", config, "--json")[1]
    longest = int(re.search(r"tokens per row: \d+ to (\d+)", shown)[1])
    assert (checked, json.loads(exact)["row"]["seq"]) == (0, longest)
    exact = finch(capsys, "check", "--exact", config, "--json", "--seq", "85")[1]
    assert json.loads(exact)["row"] == {"seq": 85, "targets": 37}


@pytest.mark.parametrize(
    ("text", "words", "expected"),
    [
        ("", (), None),  # the good file twice
        ('{"question": "a", "answer": null}\n' * 2, (), "no row of {file} can be used"),
        ("", ("tokenizer.path=/nowhere/tokenizer.model",), "tokenizer: "),
    ],
)
def test_estimate_says_which_rows_it_takes(text, words, expected, base_folder, rows_file, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    file.write_text(text or rows_file.read_text())
    rows = {"_component_": "finch.data.rows.rows_dataset", "data_files": str(file), "format": "question_answer"}
    dataset = rows if text else [{**rows, "weight": 0.5}, {**rows, "weight": 0.5}]
    config = write_config(tmp_path, make_config(base_folder, file, tmp_path / "run", dataset=dataset))
    code, out, _ = finch(capsys, "check", "--exact", config, "--json", *words)
    found = json.loads(out)
    assert (code, found["row"]["seq"] == 85) == (0, expected is not None)
    notes = [note for note in found["notes"] if note.startswith("rows not read (")]
    if expected is None:
        assert notes == []
    else:
        [note] = notes
        assert note.startswith("rows not read (" + expected.format(file=file))
        assert note.endswith("): 85 tokens, TOFU's mean, were taken; give --seq")


def test_tensor_parallel_ranks_see_the_same_tokens(estimate):
    plan = {"_component_": "torchtune.models.llama3.base_llama_tp_plan"}
    parallel = {"tensor_parallel_dim": 2, "tensor_parallel_plan": plan}
    given = ("--gpus", "2", "--seq", "20", "--targets", "8", "--launch-us", "1", "--matmul-tflops", "1e-5")
    out = estimate(*given, **parallel)[1]
    seconds, rate = (
        float(re.search(text, out)[1].replace(",", "")) for text in (r"at least ([\d.]+) s", r"at most ([\d,]+) target")
    )
    assert rate == pytest.approx(4 * 8 / seconds, rel=0.05)


def test_estimate_asks_no_hub(estimate, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("finch.base.hub._find", lambda *args: pytest.fail(f"asked for {args}"))
    dataset = {"_component_": "finch.data.rows.rows_dataset", "source": "Acme/Rows"}
    code, out, _ = estimate("--seq", "20", "--targets", "8", dataset=dataset)
    assert code == 0, out


def test_estimate_as_json_is_what_the_text_shows(estimate):
    given = ("--gpus", "2", "--gpu-memory", "0.0001", "--seq", "20", "--launch-us", "2", "--collective-us", "300")
    (code, text, _), (json_code, out, _) = estimate(*given), estimate(*given, "--json")
    assert (code, json_code) == (1, 1)
    found = json.loads(out)
    assert (found["parameters"], found["shards"], found["row"], found["fits"]) == (
        19616,
        2,
        {"seq": 20, "targets": 8},
        False,
    )
    sizes = dict(re.findall(r"^ +([a-z ]+?) +([\d.]+) kB$", text, re.MULTILINE))
    for part, size in {**found["memory"], "peak": found["device_peak"]}.items():
        assert size < found["peak"] / 10_000 or float(sizes[part]) == round(size / 1000, 1)
    assert f"{sum(found['launches'].values()):,} operators launched" in text
    calls = sum(each["calls"] for each in found["collectives"])
    expected = 2e-6 * sum(found["launches"].values()) + 300e-6 * calls
    assert found["seconds"] == {"host": pytest.approx(expected)}
    assert re.search(r"^time +[\d.]+ s of the host at 2 us per operator and 300 us per collective$", text, re.MULTILINE)
    assert sum(each["sent_bytes"] for each in found["collectives"]) == found["sent_bytes"] > 0
    assert all(change in text for change in found["saves_memory"])


def test_estimate_proposes_a_copy_per_node_where_it_is_faster(estimate):
    """On two nodes of two: of a ring over all four the slowest link decides."""
    host = ("--launch-us", "0.001", "--collective-us")
    rates = ("--gpus-per-node", "2", "--bandwidth-gb-s", "10", "--node-bandwidth-gb-s")
    given = ("--gpus", "4", "--seq", "20", *rates)
    found = json.loads(estimate(*given, "1", *host, "0.001", "--json")[1])
    copies, all_ranks = found["with_a_copy_per_node"], found["seconds"]["network"]
    assert found["sent_bytes"] / 1e9 == pytest.approx(all_ranks)
    assert copies["number"] == 2
    assert copies["seconds"]["network"] < all_ranks / 2  # gradients: a half of the shards' bytes
    _, out, _ = estimate(*given, "1", *host, "0.001", "data_parallel_shard_dim=4")
    assert "faster        data_parallel_replicate_dim=2: at least " in out
    assert "faster" not in estimate(*given, "100", *host, "0.001")[1]
    assert "faster" not in estimate(*given, "1", *host, "1000")[1]  # the host is the bound


def test_estimate_names_what_saves_memory(estimate):
    code, out, _ = estimate("--gpu-memory", "0.001", "--seq", "60", batch_size=8)
    assert code == 1
    assert "too large     for 0.001 GB by" in out
    assert re.search(r"^saves memory +enable_activation_checkpointing=True$", out, re.MULTILINE)
    assert re.search(r"^ +batch_size=1 gradient_accumulation_steps=8$", out, re.MULTILINE)
    assert re.search(r"^ +batch_size=4 --gpus 2$", out, re.MULTILINE)
    given = ("--gpus", "2", "--gpu-memory", "0.001", "--seq", "60", "fsdp_reshard_after_forward=False")
    _, out, _ = estimate(*given, batch_size=7)
    assert re.search(r"^saves memory +fsdp_reshard_after_forward=True$", out, re.MULTILINE)
    assert "--gpus" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--seq", "8", "--targets", "8"), "--targets 8 must be below --seq 8"),
        (
            ("dataset.packed=True", "tokenizer.max_seq_len=null"),
            "gives dataset.packed=True no length of a pack: set it",
        ),
        (("--gpus", "3", "data_parallel_replicate_dim=2"), "does not divide the 3 ranks"),
        (("--node-bandwidth-gb-s", "50"), "needs --bandwidth-gb-s, the rate inside a node; give both"),
    ],
)
def test_estimate_reports_a_mistake_in_one_line(arguments, message, estimate):
    code, _, err = estimate(*arguments)
    assert code == 1
    [error] = [line for line in err.splitlines() if line.startswith("finch: error: ")]
    assert message in error
