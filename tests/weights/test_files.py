"""Files written in parts, against safetensors' own."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from finch.base.errors import UserError
from finch.checkpoint import manifest
from finch.weights.files import (
    SAFETENSORS_METADATA,
    SafetensorsWriter,
    check_export,
    copy_side_files,
    is_whole,
    new_model_folder,
    save_tensors,
)


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


@pytest.fixture
def model(tmp_path):
    """A folder as finch writes it."""
    with new_model_folder(tmp_path / "model") as partial:
        save_tensors(partial / "model.safetensors", {"a": torch.ones(8, 8)}, SAFETENSORS_METADATA)
        (partial / "config.json").write_text('{"a": 1}')
    return tmp_path / "model"


def test_a_changed_size_shows_always_and_a_changed_byte_with_digests(model, caplog):
    check_export(model, by_digest=True)
    assert is_whole(model)
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)
    check_export(model)
    with pytest.raises(
        UserError, match=r"model: model.safetensors is not as it was written; restore it, or remove finch_man"
    ):
        check_export(model, by_digest=True)
    (model / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json has 2 bytes instead of 8"):
        check_export(model)
    assert not is_whole(model)
    (model / "config.json").unlink()
    with pytest.raises(UserError, match=r"config.json cannot be read \(No such file or directory\)"):
        check_export(model)
    (model / manifest.EXPORTS).unlink()
    check_export(model, by_digest=True)
    assert "has no finch_manifest.json: its files are taken as they are" in caplog.text


@pytest.mark.parametrize(
    "entries", [[], {"a": 3}, {"../../etc/passwd": {"bytes": 1, "sha256": ""}}, {"a": {"bytes": 1}}, 3]
)
def test_a_manifest_that_finch_has_not_written_is_refused(entries, model):
    (model / manifest.EXPORTS).write_text(manifest._to_text(entries))
    with pytest.raises(UserError, match=r"finch_manifest.json (cannot be read|is not as it was written)"):
        check_export(model, by_digest=True)
    (model / manifest.EXPORTS).write_text(json.dumps({"files": {}}))
    with pytest.raises(UserError, match=r"is not as it was written"):
        check_export(model)


def test_side_files_are_those_of_the_folder_or_of_the_hubs_cache(tmp_path, caplog):
    """A link to elsewhere is left out, also one that a folder of the cache's layout has."""
    cache, outside, target = tmp_path / "hub" / "models--a--b", tmp_path / "outside", tmp_path / "target"
    folder = cache / "snapshots" / "0"
    for place in (folder, cache / "blobs", outside, target):
        place.mkdir(parents=True)
    (cache / "blobs" / "1").write_text("blob")
    (outside / "key").write_text("key")
    (folder / "own.json").write_text("own")
    (folder / "blob.json").symlink_to("../../blobs/1")
    (folder / "inner.json").symlink_to("own.json")
    (folder / "key.json").symlink_to(outside / "key")
    copy_side_files(folder, target)
    copied = {path.name: path.read_text() for path in target.iterdir()}
    assert copied == {"own.json": "own", "blob.json": "blob", "inner.json": "own"}
    assert f"{folder}/key.json is a link out of its folder and is not copied" in caplog.text
    shutil.rmtree(cache / "blobs")
    (cache / "blobs").symlink_to(outside)
    (folder / "blob.json").unlink()
    (folder / "blob.json").symlink_to("../../blobs/key")
    (target / "blob.json").unlink()
    copy_side_files(folder, target)
    assert not (target / "blob.json").exists()
