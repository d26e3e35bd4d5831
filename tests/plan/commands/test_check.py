"""`finch check` on a tiny model: what it reports of a good run, all mistakes of a bad one, and that it leaves nothing behind."""

import json
import os
import re
import shutil

import pytest
import torch
from helpers.models import edit_config
from helpers.runs import finch, make_config, write_config
from helpers.tokenizers import write_qwen3_tokenizer

from benchmarks.tiny_job import instruct_dataset, llama_args
from finch.base.files import gigabytes
from finch.data.dataset import Row
from finch.data.stats import DatasetStats, RowCount
from finch.plan.commands.check import HELP
from finch.weights.files import StoredTensor


@pytest.fixture
def check(base_folder, rows_file, tmp_path, capsys, monkeypatch):
    """(exit code, report) for changes of a good config; fails if a weight is read or a file written."""
    monkeypatch.setattr(StoredTensor, "read", lambda *_: pytest.fail("weights were read"))

    def run(*arguments, **changes):
        config = write_config(tmp_path / "config", make_config(base_folder, rows_file, tmp_path / "run", **changes))
        before = sorted(tmp_path.rglob("*"))
        code, out, err = finch(capsys, "check", "--config", config, *arguments)
        assert "finch: error" not in err
        assert sorted(tmp_path.rglob("*")) == before
        assert not torch.distributed.is_initialized()
        return code, out

    return run


def memory_of(out):
    """kB of each part."""
    return {part: float(size) for part, size in re.findall(r"^ +([a-z ]+?) +([\d.]+) kB$", out, re.MULTILINE)}


def test_a_rate_that_no_fine_tune_has_and_a_mistake_of_several_sections_are_said_once(check):
    code, out = check("optimizer.lr=10")
    assert "warning: optimizer.lr=10: Adam moves each weight by about that much in a step" in out
    assert code == 0
    code, out = check("optimizer.lr=abc")
    assert (code, len(re.findall("problem: optimizer: torch.optim.AdamW cannot be built", out))) == (1, 1)
    assert "warning: optimizer.lr" not in check("lr_scheduler=null")[1]
    assert "lr_scheduler none, a constant rate" in check("lr_scheduler=null")[1]


def test_check_reports_a_good_run(check, rows_file, base_folder):
    code, out = check("epochs=3")
    assert code == 0, out
    assert out.endswith("no problems found\n")
    assert "finch_full_finetune on 1 rank\n" in out
    assert "torchtune.models.llama2.llama2: 19,616 parameters, all trained" in out
    assert f"fits {base_folder}: llama, 1 weight file(s)" in out
    assert re.search(rf"dataset +{rows_file}: .*41 rows", out)
    row = json.loads(rows_file.read_text().splitlines()[0])
    assert re.search(
        rf"first row, its targets in «»: [^«»]*{re.escape(row['question'])}[^«»]*«[^«»]*{re.escape(row['answer'])}[^«»]*»",
        out,
    )
    assert " tokens: " not in out
    tokens = check("--rows", "2")[1].split("row 1 of")[1].split("row 2 of")
    assert re.match(
        rf" {rows_file}: \d+ tokens: .* \| «bird \d+» \| « 2»", tokens[0]
    )  # SentencePiece's </s> has no text
    assert len(tokens) == 2
    assert "4 samples a step (4 x 1 x 1 ranks), 11 steps an epoch, 3 epochs: 33 steps" in out
    files = sum(path.stat().st_size for path in base_folder.iterdir() if path.suffix != ".safetensors")
    epoch = 78_464 + files
    assert f"epoch_N/: {epoch / 1000:.1f} kB an epoch, 3 epochs: {gigabytes(3 * epoch)}" in out
    assert "checkpoints/step_N/: 235.4 kB each" in out
    for which in ("last", "best"):
        key = f"save_{which}_{'epoch_' if which == 'last' else ''}only=True"
        assert f"an epoch, the {which} epoch alone: {epoch / 1000:.1f} kB" in check("epochs=3", key)[1]
    assert "by a formula; `finch check --exact` takes longer and is closer" in out
    sizes = memory_of(out)
    assert sizes["weights"] == sizes["gradients"] == 78.5
    assert (sizes["weights"], sizes["optimizer states"]) == pytest.approx((78.5, 156.9), rel=0.01)
    assert {"activations", "peak"} <= set(sizes)


def test_check_shows_all_tokens_of_long_rows(check, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"question": "which bird?", "answer": " ".join(f"\x1b bird {i}" for i in range(99))}))
    out = check("--rows", "1", f"dataset.data_files={file}", "batch_size=1")[1]
    [(number, tokens)] = re.findall(r"(\d+) tokens: (.*)", out)
    assert tokens.count(" | ") + 1 == int(number) == 64
    assert "\x1b" not in out


def test_check_counts_the_steps_of_a_mixture(check, rows_file):
    entries = [{**instruct_dataset(rows_file), "weight": weight} for weight in (0.8, 0.2)]
    code, out = check("epochs=2", dataset=entries)
    assert code == 0, out
    assert re.search(r"steps +an epoch draws 51 samples: 41 \(80\.39%\)", out)
    assert "4 samples a step (4 x 1 x 1 ranks), 13 steps an epoch, 2 epochs: 26 steps" in out


def test_check_warns_of_a_rate_above_the_cap(check):
    assert re.search(
        r"lr_scheduler finch.FinchLR, eta_max \S+, at its cap below 0.16 nats$", check("optimizer.lr=2e-3")[1], re.M
    )
    code, out = check("optimizer.lr=2e-2")
    assert code == 0, out
    assert (
        "warning: lr_scheduler: FINCH has no effect: eta_max=0.005 caps the learning rate while the loss is below 16 nats"
        in out
    )


def test_check_of_several_ranks_divides_the_weights(check):
    code, out = check("--nproc_per_node", "2")
    assert code == 0, out
    assert "8 samples a step (4 x 1 x 2 ranks), 6 steps an epoch" in out
    assert "weights divided over 2 ranks" in out
    assert memory_of(out)["weights"] == 39.2
    assert memory_of(out)["gathered layers"] > 0


def test_check_names_what_the_gpus_lack(check, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    _, out = check("--nproc_per_node", "2", "device=cuda", "dtype=bf16")
    assert re.findall(r"problem: (.*)", out) == [
        "--nproc_per_node 2: this machine has 1 GPU; start at most that many",
        "dtype=bf16 needs bf16, which Tesla T4 lacks: use fp32",
    ]


def test_check_of_lora_counts_only_trained_weights(check):
    code, out = check("method=lora", "model.lora_rank=2")
    assert code == 0, out
    trained = int(re.search(r"parameters, ([\d,]+) \(\d+\.\d%\) trained", out)[1].replace(",", ""))
    assert memory_of(out)["optimizer states"] == pytest.approx(8 * trained / 1000, rel=0.02)
    assert "epoch_N/ and epoch_N_adapter/" in out


@pytest.mark.parametrize(
    "mistakes",
    [
        {  # found without an import that takes time: what takes time is not begun
            "epohcs=1": "unknown key epohcs=1, did you mean epochs?",
            "batch_size=x": "batch_size=x must be int >= 1",
            "lr_scheduler.etamax=3": "unknown key lr_scheduler.etamax, did you mean lr_scheduler.eta_max?",
        },
        {
            "checkpointer.checkpoint_dir=/nowhere": "checkpointer.checkpoint_dir=/nowhere is not a folder",
            "dataset.data_files=/nowhere/rows.jsonl": "dataset.data_files=/nowhere/rows.jsonl does not exist",
        },
        {
            "optimizer.lr=0": "optimizer.lr=0 must be a number above 0",
            "loss=torch.nn.MSELoss": "loss._component_=torch.nn.MSELoss is not a plain cross-entropy",
            "model.num_layers=1": "model does not fit checkpointer.checkpoint_dir",
            "tokenizer.path=/nowhere/tokenizer.model": "tokenizer: ",
        },
    ],
)
def test_check_shows_all_mistakes(check, mistakes):
    code, out = check(*mistakes)
    assert code == 1
    problems = zip(mistakes.values(), re.findall(r"problem: (.*)", out), strict=True)
    assert [problem for start, problem in problems if not problem.startswith(start)] == []
    assert out.endswith(f"{len(mistakes)} problems found\n")


def test_check_groups_bad_rows(check, rows_file, tmp_path):
    lines = rows_file.read_text().splitlines()
    lines[2] = lines[16] = lines[11] = lines[20] = '{"question": "why?", "answer": 7}'
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join(lines))
    code, out = check(f"dataset.data_files={bad}")
    assert code == 1
    [problem] = re.findall(r"problem: (.*)", out)
    rows = rf"rows 3, 12, 17, \.\.\. of {bad}; fix or remove them"
    assert re.fullmatch(rf"dataset: 4 rows cannot be used \(.*\), {rows}", problem)


def test_bad_rows_are_sorted_by_their_numbers():
    stats = DatasetStats()
    for index, number in enumerate((47, 2, 27, 9)):
        stats.add_bad("null", RowCount(1, [Row(index, number, "rows.jsonl")]))
    assert [row.number for row in stats.bad["null"].first] == [2, 9, 27]


def test_check_names_rows_with_empty_texts(check, tmp_path):
    rows = [{"messages": [{"role": role, "content": "a b c"} for role in ("user", "assistant")]} for _ in range(16)]
    for number, text in ((3, ""), (9, " \n")):
        rows[number]["messages"][number % 2]["content"] = text
    file = tmp_path / "empty.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    _, out = check(dataset={"_component_": "finch.data.rows.rows_dataset", "data_files": str(file)})
    assert "2 of 16 rows have an empty text (rows 4, 10); the model learns to answer or to write it\n" in out


def test_check_counts_rows_beyond_the_window(check, base_folder, tmp_path):
    folder = shutil.copytree(base_folder, tmp_path / "mistral")
    edit_config(folder, model_type="mistral", sliding_window=10)
    model = {"_component_": "torchtune.models.mistral.mistral", **llama_args()}
    overrides = (f"checkpointer.checkpoint_dir={folder}", "~checkpointer.model_type")
    code, out = check(*overrides, model=model)
    assert code == 0, out
    assert re.search(
        r"warning: \d+ of 41 rows longer than sliding_window=10 in config.json of .* are trained with", out
    )
    assert "sliding_window" not in check(*overrides, "tokenizer.max_seq_len=10", model=model)[1]


def test_check_names_a_token_without_embedding(check, tmp_path):
    write_qwen3_tokenizer(tmp_path, ["a b c"])  # 320 tokens
    code, out = check(
        tokenizer={"_component_": "finch.models.qwen3.qwen3_tokenizer", "path": str(tmp_path / "tokenizer.json")}
    )
    assert code == 1
    assert re.findall("problem: (.*)", out) == [
        "dataset: the rows have the token 261 and the model has 64 embeddings, from 0 on; give the tokenizer of this model"
    ]


def test_check_reads_the_rows_of_probes(check, rows_file):
    held_out = (f"probes.facts.data_files={rows_file}", "probes.facts.rows=5")
    code, out = check(*held_out)
    assert code == 0, out
    assert re.search(rf"probes +facts: {rows_file}, question_answer, 5 rows, \d+ tokens", out)
    for wrong, problem in {
        "probes.facts.kind=text": "probes.facts.kind=text, but the rows look like question/answer",
        "probes.other.data_files=/nowhere.jsonl": "probes.other.data_files=/nowhere.jsonl does not exist",
    }.items():
        assert f"problem: {problem}" in check(*held_out, wrong)[1]


def test_check_reads_replayed_prompts(check, rows_file):
    replayed = (f"self_replay.prompts={rows_file}", "self_replay.max_new_tokens=4")
    code, out = check(*replayed)
    assert code == 0, out
    assert re.search(rf"self_replay +{rows_file}, 41 rows, answers of up to 4 tokens", out)
    own = (f"probes.own.data_files={rows_file}", "probes.own.kind=self", "probes.own.max_new_tokens=4")
    code, out = check(*replayed, *own, dataset_validation="${dataset}")
    assert "problem: row 1 of probes.own has a prompt of self_replay.prompts=" in out
    assert "problem: row 1 of dataset_validation has a prompt of self_replay.prompts=" in out


@pytest.mark.parametrize(("folder", "reason"), [("rows.jsonl", "Not a directory"), ("ro/x", "Permission denied")])
def test_check_names_an_output_folder_that_cannot_be_written(check, tmp_path, monkeypatch, folder, reason):
    (tmp_path / "rows.jsonl").touch()
    (tmp_path / "ro").mkdir()
    # Root may write anywhere.
    monkeypatch.setattr("os.access", lambda path, mode, real=os.access: path.name != "ro" and real(path, mode))
    code, out = check(f"output_dir={tmp_path / folder}")
    assert code == 1
    problem = f"output_dir={tmp_path / folder} cannot be written ({reason}); give another folder"
    assert re.findall("problem: (.*)", out) == [problem]


@pytest.mark.parametrize("split_by", ["order", "content"])
def test_check_names_validation_rows_that_are_trained_on(check, rows_file, tmp_path, split_by):
    file = tmp_path / "dups.jsonl"
    file.write_text(3 * rows_file.read_text())
    rows = {"_component_": "finch.data.rows.rows_dataset", "data_files": str(file), "split_by": split_by}
    code, out = check(dataset={**rows, "part": "train"}, dataset_validation={**rows, "part": "validation"})
    assert code == 0, out
    line = (
        r"1\d of 12 validation rows are training rows too; dataset.split_by=content keeps such rows of a file together"
    )
    assert bool(re.search(line, out)) == (split_by == "order")


def test_check_says_how(capsys):
    assert finch(capsys, "check", "--help")[:2] == (0, f"{HELP}\n")
