"""One rank: loads a model and exports it by the recipe's functions, and writes what it measured to FOLDER/rank_N.json.

torchrun --nproc_per_node 2 -m benchmarks.memory.rank BASE FOLDER DTYPE
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torchtune.training import set_default_dtype

from benchmarks.memory.usage import AnonymousPeak, count_read_bytes
from finch.distributed import fsdp, parallel
from finch.dtensor import to_local
from finch.models import auto
from finch.training.chunked_loss import TokenLoss
from finch.training.model import load_pretrained
from finch.weights.huggingface import HuggingFaceFolder


def load_and_export(base_folder: Path, target: Path, dtype: torch.dtype, ranks: parallel.Parallel) -> dict[str, Any]:
    """Loads a model on every rank and writes it again.

    Returns:
        Of this rank, in bytes and seconds: ``shard``, the weights it keeps; ``read``, of the weight files; ``load``, the
        peak of anonymous memory while loading, above that before and its own shard; ``export``, the peak while exporting,
        above that before; ``load_seconds`` and ``export_seconds``.
    """
    base = HuggingFaceFolder(str(base_folder))
    with set_default_dtype(dtype), torch.device("meta"):
        decoder = auto(str(base_folder))
    model = TokenLoss(decoder)
    fsdp.shard_model(model, decoder.layers, ranks)
    start = time.perf_counter()
    with AnonymousPeak() as loading, count_read_bytes() as num_bytes:
        model.to_empty(device="cpu")  # memory that is not written to yet is not counted
        load_pretrained(model, base)
    load_seconds = time.perf_counter() - start
    shard = sum(to_local(parameter.detach()).nbytes for parameter in model.parameters())
    start = time.perf_counter()
    with AnonymousPeak() as exporting:
        base.write(decoder.state_dict().items(), target, is_writer=ranks.is_rank_zero)
    return {
        "shard": shard,
        "read": sum(num_bytes),
        "load": loading.peak - loading.start - shard,
        "export": exporting.peak - exporting.start,
        "load_seconds": load_seconds,
        "export_seconds": time.perf_counter() - start,
    }


def main() -> None:
    base_folder, folder, dtype = Path(sys.argv[1]), Path(sys.argv[2]), getattr(torch, sys.argv[3])
    ranks = parallel.start(torch.device("cpu"), shard=False)
    measured = load_and_export(base_folder, folder / "exported", dtype, ranks)
    (folder / f"rank_{ranks.rank}.json").write_text(json.dumps(measured))
    parallel.stop()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
