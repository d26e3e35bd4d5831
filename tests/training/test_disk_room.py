"""The bytes that an epoch writes, against what it does write."""

from collections import namedtuple

import pytest
import torch
from helpers.models import load, save
from omegaconf import OmegaConf
from torchtune.models.llama2 import lora_llama2

from finch.errors import UserError
from finch.training import run as disk_room

Usage = namedtuple("Usage", "free")


def weight_bytes(folder):
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.parametrize("name", ["llama", "qwen3 tied"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_exported_bytes_equal_the_folder_s(name, dtype, tmp_path):
    save(name, tmp_path / "base")
    base, decoder = load(name, tmp_path / "base")
    base.write(decoder.state_dict().items(), tmp_path / "epoch_0", is_writer=True, dtype=dtype)
    written, computed = weight_bytes(tmp_path / "epoch_0"), disk_room.exported_bytes(decoder, dtype)
    assert computed < written < computed + 8192  # the header


def test_exported_bytes_of_lora():
    with torch.device("meta"):
        decoder = lora_llama2(
            ["q_proj"],
            vocab_size=10,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            embed_dim=8,
            max_seq_len=8,
            lora_rank=2,
            lora_alpha=2,
        )
    adapter = 4 * (2 * 8 + 8 * 2)
    assert disk_room.exported_bytes(decoder, None, adapter_only=True) == adapter
    complete = sum(weight.numel() for weight in decoder.parameters())
    assert disk_room.exported_bytes(decoder, torch.bfloat16) == 2 * complete


def test_check_disk_room(monkeypatch, caplog):
    cfg = OmegaConf.create({"output_dir": "/nowhere/run", "epochs": 1, "save_last_epoch_only": False})
    decoder = torch.nn.Linear(10, 10, bias=False)  # 400 bytes
    for free, freed, is_warned in ((800, 0, False), (799, 1, False), (799, 0, True), (400, 0, True)):
        caplog.clear()
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: Usage(free))
        disk_room.check_disk_room(cfg, decoder, dtype=None, freed_bytes=freed)
        assert bool(caplog.records) == is_warned
    for is_last_only, first, needed in ((False, 0, 2000), (False, 3, 800), (True, 0, 800)):
        for free in (needed - 1, needed):
            caplog.clear()
            monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: Usage(free))
            cfg.epochs, cfg.save_last_epoch_only = 4, is_last_only
            disk_room.check_disk_room(cfg, decoder, dtype=None, first_epoch=first)
            assert bool(caplog.records) == (free < needed)
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(399))
    with pytest.raises(UserError, match="/nowhere/run has 399 bytes of free disk, the weights of one epoch need 400;"):
        disk_room.check_disk_room(cfg, decoder, dtype=None)
