"""The base model: a tiny Llama trained on the old world from random weights with finch's recipe, and cached."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from torchtune.models.llama2 import llama2
from torchtune.modules import TransformerDecoder

from examples.quickstart.world import World, new_world, old_world
from finch.base.errors import UserError
from finch.base.progress import LINE_INTERVAL_S
from finch.base.run_files import STATUS
from finch.config.instantiate import find_config
from finch.study.sweep.local import progress_of
from finch.weights.huggingface import HuggingFaceFolder

VOCAB_SIZE = 1024
FREE_BYTES_NEEDED = 500 * 10**6

# config.json of the base model; configs/quickstart/*.yaml build the same model.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def run_side_by_side(*runs: tuple[str, Path, list[str]]) -> None:
    """``finch run CONFIG output_dir=OUTPUT OVERRIDE ...`` of each run, with stdout and stderr in OUTPUT.log.

    The runs train side by side on one thread each: the model is too small for more, and the numbers do not depend on the machine's cores.

    Args:
        runs: each (CONFIG, OUTPUT, OVERRIDES).

    Raises:
        UserError: a run has failed; with the last lines of its log.
    """
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    processes: dict[Path, subprocess.Popen[bytes]] = {}
    last_line = time.monotonic()
    try:
        for config, output, overrides in runs:
            command = ["run", config, f"output_dir={output}", "overwrite=True"]
            print("  finch " + " ".join([*command, *overrides]), flush=True)
            log = output.with_name(output.name + ".log")
            log.parent.mkdir(parents=True, exist_ok=True)
            start = [sys.executable, "-m", "finch.cli", *command, *overrides]
            with log.open("w", encoding="utf-8") as file:
                processes[log] = subprocess.Popen(start, stdout=file, stderr=subprocess.STDOUT, env=environment)
        while any(process.poll() is None for process in processes.values()):
            time.sleep(0.2)
            if time.monotonic() - last_line > LINE_INTERVAL_S:
                last_line = time.monotonic()
                for _, output, _ in runs:
                    print(f"  {output.name}: {progress_of(output / STATUS) or 'begins'}", flush=True)
        for log, process in processes.items():
            if (code := process.wait()) != 0:
                last_lines = " | ".join(log.read_text(encoding="utf-8").strip().splitlines()[-5:])
                raise UserError(f"finch run failed with code {code}; {log} ends with: {last_lines}")
    finally:
        for process in processes.values():
            process.kill()


def finch(*words: str) -> int:
    """Runs a command of finch; returns its exit code."""
    print("finch " + " ".join(words), flush=True)
    return subprocess.call([sys.executable, "-m", "finch.cli", *words])


def prepare(folder: Path) -> Path:
    """Writes both worlds' rows; trains the tokenizer and the base model, or reuses them from an earlier call.

    Returns:
        the base model's Hugging Face folder.

    Raises:
        UserError: the disk is full or ``folder`` is not writable.
    """
    try:
        return _prepare(folder)
    except OSError as error:
        path = error.filename or folder
        raise UserError(
            f"--out {folder}: {path} cannot be written ({error.strerror}); free disk space or give another folder"
        ) from error


def _prepare(folder: Path) -> Path:
    data, cache = folder / "data", folder / f"base_{_fingerprint()}"
    data.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < FREE_BYTES_NEEDED:
        raise UserError(
            f"--out {folder} has {free / 1e6:.0f} MB free, the quickstart needs {FREE_BYTES_NEEDED / 1e6:.0f}; "
            "free disk space or give another folder"
        )
    old, new = old_world(), new_world()
    old.write(data / "old.jsonl")
    # For self_replay and its probe; no fact that is measured at the end is asked for.
    World(old.about("home").rows[1::4]).write(data / "replayed.jsonl")
    World(old.about("work").rows[1::4]).write(data / "probe.jsonl")
    # Each new fact in one phrasing, four times: an epoch is then 25 steps of 32 samples and gives one point of the figure.
    World(new.first_phrasings * 4).write(data / "new.jsonl")
    if (cache / "ready").exists():
        print(f"base model: cached in {cache}", flush=True)
        return cache / "model"
    shutil.rmtree(cache, ignore_errors=True)
    start = cache / "random"
    start.mkdir(parents=True)
    text = data / "text.txt"
    text.write_text("\n".join([*old.text(), *new.text()]), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(start / "tokenizer"), vocab_size=VOCAB_SIZE, model_type="bpe", minloglevel=2
    )
    _write_random_model(start)
    print("base model: a Llama of 0.9 M parameters learns 600 facts of the old world", flush=True)
    run_side_by_side(("quickstart/base", cache / "run", [f"start={start}", f"rows={data / 'old.jsonl'}"]))
    last = max((cache / "run").glob("epoch_*"), key=lambda path: int(path.name.removeprefix("epoch_")))
    last.rename(cache / "model")
    shutil.rmtree(cache / "run")
    shutil.rmtree(start)
    (cache / "ready").touch()
    return cache / "model"


def _write_random_model(folder: Path) -> None:
    torch.manual_seed(0)
    decoder = build_decoder(CONFIG)
    for name, parameter in decoder.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2), encoding="utf-8")
    finished = folder.with_name("finished")
    HuggingFaceFolder(str(folder), checkpoint_files=[]).write(decoder.state_dict().items(), finished, is_writer=True)
    shutil.rmtree(folder)
    finished.rename(folder)


def build_decoder(config: dict[str, Any]) -> TransformerDecoder:
    """The torchtune model that a quickstart folder's config.json describes."""
    return llama2(
        vocab_size=config["vocab_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        embed_dim=config["hidden_size"],
        max_seq_len=config["max_position_embeddings"],
        intermediate_dim=config["intermediate_size"],
        norm_eps=config["rms_norm_eps"],
    )


def _fingerprint() -> str:
    """Hash of all that the base model depends on: a changed world or config does not use the cached model."""
    parts = [
        json.dumps(CONFIG),
        find_config("quickstart/base").read_text(encoding="utf-8"),
        *old_world().text(),
        *new_world().text(),
    ]
    return hashlib.sha256("\n".join([sys.version.split()[0][:4], torch.__version__, *parts]).encode()).hexdigest()[:12]
