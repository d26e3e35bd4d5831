"""The configs for Qwen3-4B and Llama-3-8B as shipped, on small models of their families and local rows."""

import json
import re
import shlex
import socket
import subprocess
import sys

import pytest
import torch
import yaml
from helpers.models import FAMILIES, save
from helpers.runs import environment, run_here
from helpers.tokenizers import write_llama3_tokenizer, write_qwen3_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.tiny_text import WORDS
from finch.config.instantiate import config_names, find_config
from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys

LARGE = ["qwen3/4B_finch", "qwen3/4B_sft", "llama3/8B_finch", "llama3/8B_sft"]


@pytest.mark.parametrize("name", [name for name in config_names() if name != "auto"])  # see tests/auto
def test_config_is_valid_and_its_header_has_commands(name):
    given = [
        f"{key}=GIVEN"
        for key in ("data_root", "base", "start", "rows")
        if f"\n{key}: ???" in find_config(name).read_text()
    ]
    cfg = read(["--config", name, *given], FullFinetuneKeys)
    assert cfg.output_dir == f"out/{name}"
    header = find_config(name).read_text().split("\n\n")[0]
    for word in ("tune run", "--nproc_per_node", "Override:", "Memory"):
        assert word in header
    if name in LARGE:
        for word in ("Download:", "One 141 GB GPU:", "Two nodes", "--rdzv_endpoint"):
            assert word in header


@pytest.mark.parametrize("family", ["qwen3/4B", "llama3/8B", "smollm2/135M"])
def test_finch_and_sft_configs_differ_in_the_schedule(family):
    finch, sft = (read(["--config", f"{family}_{kind}"], FullFinetuneKeys) for kind in ("finch", "sft"))
    assert {key for key in finch if finch[key] != sft[key]} <= {
        "lr_scheduler",
        "output_dir",
        "checkpointer",
        "metric_logger",
    }
    rates = (2.5e-4, 1e-4) if family == "smollm2/135M" else (5e-5, 2e-5)
    assert (finch.lr_scheduler.eta_max, finch.optimizer.lr, finch.lr_scheduler.ema) == (*rates, 0.9)
    assert finch.batch_size * finch.gradient_accumulation_steps == 16
    if "warmup_fraction" in sft.lr_scheduler:
        assert sft.lr_scheduler.warmup_fraction == 0.05
        return
    steps = finch.epochs * 3600 // 16
    assert sft.lr_scheduler.num_warmup_steps == pytest.approx(0.05 * steps, abs=1)


def shrunk(name, folder, rows, run):
    """The shipped file with the model, the rows and the device changed, nothing else."""
    config = yaml.safe_load(find_config(name).read_text())
    family = FAMILIES["qwen3 tied" if name.startswith("qwen3") else "llama 3"]
    config["model"] = {"_component_": family.component, **family.arguments}
    if name.startswith("qwen3"):
        config["model"].update(vocab_size=320)
        save("qwen3 tied", folder, vocab_size=320)
        write_qwen3_tokenizer(folder, WORDS)
    else:
        config["model"].update(vocab_size=128256, embed_dim=16, num_heads=2, num_kv_heads=1, rope_base=500000)
        torch.manual_seed(0)
        llama = LlamaConfig(
            vocab_size=128256,
            hidden_size=16,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            tie_word_embeddings=False,
        )
        LlamaForCausalLM(llama).save_pretrained(folder)
        write_llama3_tokenizer(folder)
    config["dataset"]["data_files"] = str(rows)  # the validation rows follow
    return {**config, "model_dir": str(folder), "output_dir": str(run), "device": "cpu", "max_steps_per_epoch": 1}


@pytest.mark.parametrize("name", LARGE)
def test_config_trains_a_shrunk_model(name, tmp_path, rows_file):
    config = shrunk(name, tmp_path / "base", rows_file, tmp_path / "run")
    done = run_here(tmp_path, config, "epochs=2", "tokenizer.max_seq_len=64")
    assert done.returncode == 0, done.output
    assert len(done.column("loss")) == 2
    assert AutoModelForCausalLM.from_pretrained(done.folder / "best").dtype == torch.bfloat16


def two_node_command(name):
    header = find_config(name).read_text().split("\n\n")[0].replace("#", "")
    return re.search(r"tune run --nnodes 2 .*?\\\n.*?$", header, re.MULTILINE | re.DOTALL)[0].replace("\\\n", " ")


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
    config["tokenizer"]["max_seq_len"] = 64
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    for words, result in (("nproc_per_node 8", "nproc_per_node 1"), ("HOST:29500", endpoint), (name, str(file))):
        assert command.count(words) == 1, command
        command = command.replace(words, result)
    tune = [sys.executable, "-m", "torchtune._cli.tune", *shlex.split(command)[1:]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen(tune, cwd=tmp_path, env=environment(), **pipes) for _ in range(2)]
    outputs = [node.communicate(timeout=600)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs[0][-2000:] + outputs[1][-2000:]
    assert sum("2 ranks on cpu" in output for output in outputs) == 1  # only rank 0 speaks
    one = run_here(
        tmp_path, {**config, "output_dir": str(tmp_path / "one")}, "batch_size=2", "gradient_accumulation_steps=1"
    )
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    for column in ("loss", "ema_loss", "lr", "grad_norm"):
        assert [line[column] for line in lines if column in line] == pytest.approx(one.column(column), rel=1e-5)
