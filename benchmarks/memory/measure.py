"""Writes a random model of about 1 GB, loads and exports it on 1, 2 and 4 processes, and prints a table of host memory."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from benchmarks.tiny_job import ROOT, environment, torchrun
from finch.checkpoint.manifest import file_entry

_MB = 1e6
_SHARD_SIZE = "300MB"
SIZE = {"num_layers": 16, "dim": 1024, "vocab_size": 32000}
_HEADER = """\
| weights | ranks | shard, MB | read, MB | loading, MB | exporting: rank 0, MB | other ranks, MB | load, s | export, s | sha256 of the export |
|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"""


def make_base(folder: Path, *, num_layers: int, dim: int, vocab_size: int) -> int:
    """Writes a Llama-shaped model of random fp32 weights as transformers does, in files of 300 MB. Returns its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=dim,
        intermediate_size=dim * 11 // 4,
        num_hidden_layers=num_layers,
        num_attention_heads=dim // 64,
        num_key_value_heads=dim // 256,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=_SHARD_SIZE)
    return sum(parameter.nbytes for parameter in model.parameters())


def measure(base: Path, ranks: int, dtype: str) -> tuple[list[dict[str, float]], str]:
    """Starts the ranks. Returns what each measured (:func:`benchmarks.memory.rank.load_and_export`), and the SHA-256 of the
    exported weights.

    Args:
        base: the model's folder.
        dtype: of the loaded weights, torch's name.
    """
    with tempfile.TemporaryDirectory(dir=base.parent) as name:
        folder = Path(name)
        command = torchrun(ranks, "-m", "benchmarks.memory.rank", str(base), str(folder), dtype)
        subprocess.run(command, env=environment(ROOT, ROOT / "recipes"), check=True, stdout=subprocess.DEVNULL)
        measured = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
        return measured, file_entry(folder / "exported" / "model.safetensors")["sha256"]


def table_row(dtype: str, measured: list[dict[str, float]], digest: str) -> str:
    """The largest of all ranks; when exporting, rank 0, which writes, and the others."""
    most = {key: max(rank[key] for rank in measured) for key in measured[0]}
    others = max((rank["export"] for rank in measured[1:]), default=None)
    cells = [
        dtype,
        str(len(measured)),
        *(f"{most[key] / _MB:,.0f}" for key in ("shard", "read", "load")),
        f"{measured[0]['export'] / _MB:,.0f}",
        "" if others is None else f"{others / _MB:,.0f}",
        *(f"{most[key]:.1f}" for key in ("load_seconds", "export_seconds")),
        digest[:12],
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="of the loaded weights")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    try:
        num_bytes = make_base(work / "base", **SIZE)
        print(f"a model of {num_bytes / _MB:,.0f} MB in files of {_SHARD_SIZE}")
        print(_HEADER)
        for dtype in arguments.dtypes:
            for ranks in arguments.ranks:
                print(table_row(dtype, *measure(work / "base", ranks, dtype)), flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
