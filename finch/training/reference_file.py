"""Tensors that the pretrained model gave for some rows, kept in RUN/ under a fingerprint: a resumed run never computes them with tuned weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from safetensors import safe_open
from safetensors.torch import save_file

from finch import files
from finch.data.training_data import TrainingData
from finch.distributed.parallel import Parallel
from finch.weights.huggingface import PretrainedFolder

_NUM_PIECES, _PIECE_BYTES = 64, 65536


class ReferenceFile:
    """A safetensors file that counts only under its fingerprint.

    It is mapped into memory: the ranks of a machine share its pages, and what is not in use need not be in memory.

    Args:
        path: of the file.
        fingerprint: see :func:`fingerprint_of`.
    """

    def __init__(self, path: Path, fingerprint: str) -> None:
        self.path, self._fingerprint = path, fingerprint

    @classmethod
    def of_training_rows(
        cls, path: Path, cfg: DictConfig, base: PretrainedFolder, data: TrainingData, **settings: Any
    ) -> ReferenceFile:
        """The file of a run's training rows.

        Args:
            data: with statistics, whose digest of the rows is in the fingerprint.
            settings: what decides the tensors beside the model and its dtype.
        """
        assert data.stats is not None
        settings = {"model": OmegaConf.to_container(cfg.model, resolve=True), "dtype": cfg.dtype, **settings}
        return cls(path, fingerprint_of(base.files, data.stats.digest, settings))

    def load(self, parallel: Parallel) -> dict[str, torch.Tensor] | None:
        """The tensors, if every rank can read them; a collective. None: no file, of another model or other rows, or damaged."""
        tensors = self._read()
        return tensors if parallel.all_true(tensors is not None) else None

    def save(self, tensors: Mapping[str, torch.Tensor]) -> None:
        with files.atomic_file(self.path) as partial:
            save_file(dict(tensors), partial, metadata={"fingerprint": self._fingerprint})

    def _read(self) -> dict[str, torch.Tensor] | None:
        try:
            with safe_open(self.path, framework="pt") as content:
                if (content.metadata() or {}).get("fingerprint") != self._fingerprint:
                    return None
                return {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        except Exception:
            return None  # safetensors has no class of its own for a truncated file; the tensors are computed again


def fingerprint_of(weight_files: Iterable[Path], rows: int, settings: Mapping[str, Any]) -> str:
    """What tensors of the pretrained model belong to.

    Args:
        weight_files: of the pretrained model; their sizes and 64 pieces spread over each are read, since tuning changes every
            weight and reading complete files would take minutes.
        rows: digest of all tokenized rows, which depend on tokenizer, template and max_seq_len.
        settings: whatever else decides the tensors, as JSON: the model's block, the dtype.
    """
    digest = hashlib.sha256(json.dumps([rows, settings], sort_keys=True).encode())
    for file in weight_files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as content:
            for piece in range(_NUM_PIECES):
                content.seek(size * piece // _NUM_PIECES)
                digest.update(content.read(_PIECE_BYTES))
    return digest.hexdigest()
