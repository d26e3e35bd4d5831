"""The configs for Qwen3-4B and Llama-3-8B as shipped, on small models of their families and local rows."""

import re
import shlex
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from helpers.models import FAMILIES, save
from helpers.runs import Run, environment, finished
from helpers.tokenizers import write_qwen3_tokenizer, write_tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.tiny_text import WORDS
from finch.config.instantiate import config_names, find_config
from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys

LARGE = ["qwen3/4B_finch", "qwen3/4B_sft", "llama3/8B_finch", "llama3/8B_sft"]


@pytest.mark.parametrize("name", [name for name in config_names() if name != "auto"])  # see tests/auto
def test_config_is_valid_and_its_header_has_commands(name):
    text = find_config(name).read_text()
    given = [f"{key}=GIVEN" for key in re.findall(r"\n(\w+): \?\?\?", text)]
    assert read(["--config", name, *given], FullFinetuneKeys).output_dir == f"out/{name}"
    words = ["finch run", "--nproc_per_node", "Override:", "Memory"]
    words += ["Download:", "One 80 GB GPU:", "Two nodes", "--rdzv_endpoint"] * (name in LARGE)
    assert [word for word in words if word not in text.split("\n\n")[0]] == []


@pytest.mark.parametrize("family", ["qwen3/4B", "llama3/8B", "smollm2/135M"])
def test_finch_and_sft_configs_differ_in_the_schedule_and_its_rate(family):
    finch, sft = (read(["--config", f"{family}_{kind}"], FullFinetuneKeys) for kind in ("finch", "sft"))
    different = {key for key in finch if finch[key] != sft[key]}
    assert different <= {"lr_scheduler", "optimizer", "output_dir", "checkpointer", "metric_logger"}
    assert {**finch.optimizer, "lr": sft.optimizer.lr} == sft.optimizer
    assert sft.optimizer.lr == (1e-4 if family == "smollm2/135M" else 5e-5)
    rates = (2.5e-4, 1e-4) if family == "smollm2/135M" else (5e-5, 2e-5)
    assert (finch.lr_scheduler.eta_max, finch.optimizer.lr, finch.lr_scheduler.ema) == (*rates, 0.9)
    assert finch.batch_size * finch.gradient_accumulation_steps == 16
    steps = finch.epochs * 3600 // 16
    warmup = sft.lr_scheduler.get("warmup_fraction", 0) * steps or sft.lr_scheduler.num_warmup_steps
    assert warmup == pytest.approx(0.05 * steps, abs=1)


def shrunk(name, folder, rows, run):
    """The shipped file with the model, the rows and the device changed, nothing else."""
    config = yaml.safe_load(find_config(name).read_text())
    family = "qwen3 tied" if name.startswith("qwen3") else "llama 3"
    config["model"] = FAMILIES[family].config(vocab_size=512)
    save(family, folder, vocab_size=512)
    if name.startswith("qwen3"):
        write_qwen3_tokenizer(folder, WORDS)
    else:
        write_tokenizer(folder, WORDS, bos="<|begin_of_text|>", eos="<|end_of_text|>", special=[])
    config["dataset"]["data_files"] = str(rows)  # the validation rows follow
    config["tokenizer"]["max_seq_len"] = 64
    return {**config, "model_dir": str(folder), "output_dir": str(run), "device": "cpu", "max_steps_per_epoch": 1}


@pytest.mark.parametrize("name", LARGE)
def test_config_trains_a_shrunk_model(name, tmp_path, rows_file):
    config = shrunk(name, tmp_path / "base", rows_file, tmp_path / "run")
    done = finished(tmp_path, config, "epochs=2", "device=auto")
    assert len(done.column("loss")) == 2
    assert AutoModelForCausalLM.from_pretrained(done.folder / "best").dtype == torch.bfloat16


def two_node_command(name):
    header = find_config(name).read_text().split("\n\n")[0].replace("#", "")
    return re.search(r"finch run --nnodes 2 .*?\\\n.*?$", header, re.MULTILINE | re.DOTALL)[0].replace("\\\n", " ")


@pytest.mark.slow
def test_two_node_command_of_the_header(tmp_path, rows_file):
    """Two torchrun agents on this machine meet as two nodes would, by the very words of the header; equal to one process."""
    name = "qwen3/4B_finch"
    command = two_node_command(name)
    assert all(two_node_command(other).replace(other, name) == command for other in LARGE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    config = shrunk(name, tmp_path / "base", rows_file, tmp_path / "two")
    config.update(dtype="fp32", epochs=1, max_steps_per_epoch=3)
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    for words, result in (("nproc_per_node 8", "nproc_per_node 1"), ("HOST:29500", endpoint), (name, str(file))):
        assert command.count(words) == 1, command
        command = command.replace(words, result)
    start = [sys.executable, "-m", "finch.cli", *shlex.split(command)[1:]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen(start, cwd=tmp_path, env=environment(), **pipes) for _ in range(2)]
    outputs = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs[0][-2000:] + outputs[1][-2000:]
    assert sum("2 ranks on cpu" in output for output in outputs) == 1  # only rank 0 speaks
    one = finished(tmp_path, config, "batch_size=2")
    two = Run(0, "", tmp_path / "two")
    for column in ("loss", "ema_loss", "lr", "grad_norm"):
        assert two.column(column) == pytest.approx(one.column(column), rel=1e-5)
