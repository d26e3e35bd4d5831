"""Host memory of each rank while a model is loaded and exported.

    python -m benchmarks.memory

Writes a random model of about 1 GB, loads and exports it on 1, 2 and 4 processes, as fp32 and as bf16, and prints a table.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torchtune.training import set_default_dtype

from benchmarks.processes import Ranks, print_rows
from benchmarks.tiny_job import make_llama
from finch.base.dtensor import to_local
from finch.checkpoint.manifest import file_entry
from finch.distributed import fsdp, parallel
from finch.models import auto
from finch.training.chunked_loss import TokenLoss
from finch.weights.files import StoredTensor
from finch.weights.huggingface import HuggingFaceFolder

RANKS, DTYPES = (1, 2, 4), (torch.float32, torch.bfloat16)
_INTERVAL_S = 0.002
SIZES: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
}


def anonymous_bytes() -> int:
    """Memory that belongs to this process only. Pages of mapped files are not counted: the system takes them back when it needs them."""
    [line] = [each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


@contextlib.contextmanager
def anonymous_peak() -> Iterator[dict[str, float]]:
    """At its end: ``growth``, the largest ``anonymous_bytes`` meanwhile, read every 2 ms by a thread, above those at its start; ``seconds``."""
    measured: dict[str, float] = {}
    start, start_time, has_ended, seen = anonymous_bytes(), time.perf_counter(), threading.Event(), [0]

    def watch() -> None:
        while not has_ended.wait(_INTERVAL_S):
            seen.append(anonymous_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield measured
    has_ended.set()
    thread.join()
    measured |= {"growth": max(*seen, anonymous_bytes()) - start, "seconds": time.perf_counter() - start_time}


@contextlib.contextmanager
def count_read_bytes() -> Iterator[list[int]]:
    """Appends the bytes of each part of a weight file that finch reads."""
    num_bytes: list[int] = []
    read = StoredTensor.read

    def counted(stored: StoredTensor, block: tuple[slice, ...]) -> torch.Tensor:
        part = read(stored, block)
        num_bytes.append(part.nbytes)
        return part

    with mock.patch.object(StoredTensor, "read", counted):
        yield num_bytes


def load_and_export(base_folder: Path, target: Path, dtype: torch.dtype) -> dict[str, Any]:
    """Loads a model by the recipe's functions on every rank and writes it again.

    Returns:
        Of this rank, by the table's columns: ``shard``, the weights it keeps; ``read``, of the weight files; ``load``, the
        peak of anonymous memory while loading, above that before and its own shard; ``export``, the peak while exporting,
        above that before; and seconds.
    """
    ranks = parallel.start(torch.device("cpu"), shard=False)
    base = HuggingFaceFolder(str(base_folder))
    with set_default_dtype(dtype), torch.device("meta"):
        decoder = auto(str(base_folder))
    model = TokenLoss(decoder)
    fsdp.shard_model(model, decoder.layers, ranks)
    with anonymous_peak() as loading, count_read_bytes() as num_bytes:
        model.to_empty(device="cpu")  # memory that is not written to yet is not counted
        base.load_into([decoder.state_dict(keep_vars=True)])
    shard = sum(to_local(parameter.detach()).nbytes for parameter in model.parameters())
    with anonymous_peak() as exporting:
        base.write(decoder.state_dict().items(), target, is_writer=ranks.is_rank_zero)
    return {
        "shard, MB": shard / 1e6,
        "read, MB": sum(num_bytes) / 1e6,
        "load, MB": (loading["growth"] - shard) / 1e6,
        "export, MB": exporting["growth"] / 1e6,
        "load, s": loading["seconds"],
        "export, s": exporting["seconds"],
    }


def _rank(connection: Connection, *arguments: Any) -> None:
    connection.send(load_and_export(*arguments))


def row_of(dtype: str, measured: list[dict[str, float]], digest: str) -> dict[str, Any]:
    """The largest of all ranks; when exporting, rank 0, which writes, and the others."""
    most = {key: max(rank[key] for rank in measured) for key in measured[0]}
    others = max((rank["export, MB"] for rank in measured[1:]), default="")
    most["export, MB"] = measured[0]["export, MB"]
    return {"weights": dtype, "ranks": len(measured), **most, "other ranks": others, "sha256": digest[:12]}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_bytes = make_llama(folder / "base", max_shard_size="300MB", **SIZES)
        print(f"a model of {num_bytes / 1e6:,.0f} MB in files of 300MB")
        rows = []
        for dtype, number in itertools.product(DTYPES, RANKS):
            with tempfile.TemporaryDirectory(dir=folder) as exported:
                target = Path(exported) / "exported"
                ranks = Ranks(_rank, folder / "base", target, dtype, log=folder / "log", ranks=number)
                measured = ranks.receive()
                ranks.close()
                digest = file_entry(target / "model.safetensors")["sha256"]
            rows.append(row_of(str(dtype).removeprefix("torch."), measured, digest))
        print_rows(rows)


if __name__ == "__main__":
    main()
