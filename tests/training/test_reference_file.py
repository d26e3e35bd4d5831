import torch

from finch.distributed.parallel import Parallel
from finch.training.reference import ReferenceFile, fingerprint_of


def test_file_counts_only_complete_and_under_its_fingerprint(tmp_path):
    path, alone = tmp_path / "reference.safetensors", Parallel(torch.device("cpu"))
    file = ReferenceFile(path, "a")
    assert file.load(alone) is None
    tensors = {"losses": torch.randn(7), "ends": torch.tensor([3, 7])}
    file.save(tensors)
    again = ReferenceFile(path, "a").load(alone)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    assert ReferenceFile(path, "b").load(alone) is None
    path.write_bytes(path.read_bytes()[:-8])
    assert file.load(alone) is None


def test_fingerprint_covers_weights_rows_and_settings(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(10_000_000))
    one = fingerprint_of([file], 1, {"dtype": "bf16"})
    assert one == fingerprint_of([file], 1, {"dtype": "bf16"})
    moved = tmp_path / "elsewhere" / "model.safetensors"
    moved.parent.mkdir()
    moved.write_bytes(file.read_bytes())
    assert one == fingerprint_of([moved], 1, {"dtype": "bf16"})
    tuned = bytearray(10_000_000)
    tuned[::2] = b"x" * 5_000_000
    moved.write_bytes(tuned)
    others = {fingerprint_of([moved], 1, {"dtype": "bf16"}), fingerprint_of([file], 2, {"dtype": "bf16"})}
    others |= {fingerprint_of([file], 1, {"dtype": "fp32"}), fingerprint_of([file, moved], 1, {"dtype": "bf16"})}
    assert one not in others
    assert len(others) == 4
