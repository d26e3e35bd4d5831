"""Files written in parts, against safetensors' own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from finch.weights.files import SAFETENSORS_METADATA, SafetensorsWriter, save_tensors


def test_parts_make_the_file_of_save_file(tmp_path):
    """Rows and columns in any order, dtypes that the format sorts by size, a name that is not ASCII."""
    torch.manual_seed(0)
    tensors = {
        "b": torch.randn(5, 3),
        "a": torch.randn(7).bfloat16(),
        "c": torch.randn(6, 4).half(),
        "ä": torch.randn(3, 8).double(),
        "B": torch.randn(9),
        "i": torch.arange(5),
        "j": torch.arange(6, dtype=torch.int32).reshape(3, 2),
        "none": torch.zeros(0, 3),
    }
    save_file(tensors, tmp_path / "expected", SAFETENSORS_METADATA)
    with SafetensorsWriter(tmp_path / "parts", tensors) as file:
        for name, tensor in reversed(tensors.items()):
            blocks = [(slice(0, 1),), (slice(1, tensor.shape[1]),)] if tensor.dim() == 2 else [()]
            for rows in () if not len(tensor) else torch.randperm(len(tensor)).split(2):
                for columns in blocks:
                    file.write_rows(name, rows, columns, tensor[rows][(slice(None), *columns)])
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "expected").read_bytes()
    save_tensors(tmp_path / "at once", tensors, SAFETENSORS_METADATA)
    assert (tmp_path / "at once").read_bytes() == (tmp_path / "expected").read_bytes()
    with pytest.raises(FileExistsError), SafetensorsWriter(tmp_path / "parts", tensors):
        pass
