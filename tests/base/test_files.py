"""Files and folders that are written completely or not at all."""

import os
from pathlib import Path

import pytest

from finch.base.files import atomic_file, atomic_folder, make_folder, read_object


@pytest.fixture
def events(monkeypatch):
    """Names in the order in which they were synced, and "rename" where something took its place."""
    found = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace
    monkeypatch.setattr(
        os, "fsync", lambda file: (found.append(Path(f"/proc/self/fd/{file}").readlink().name), fsync(file))[1]
    )
    monkeypatch.setattr(Path, "rename", lambda path, target: (found.append("rename"), rename(path, target))[1])
    monkeypatch.setattr(Path, "replace", lambda path, target: (found.append("rename"), replace(path, target))[1])
    return found


def test_content_is_on_the_disk_before_the_name_and_the_name_before_success(tmp_path, events):
    for renames in (1, 2):  # the second time in place of the first, which is moved away whole
        with atomic_folder(tmp_path / "epoch_0") as partial:
            (partial / "part").mkdir()
            for name in ("a", "part/b"):
                (partial / name).write_text(name)
            (partial / "a").chmod(0o600)  # as safetensors' writer leaves it
        assert sorted(events[:4]) == ["a", "b", "epoch_0.partial", "part"]
        assert events[4:] == [*["rename"] * renames, tmp_path.name]
        events.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["epoch_0"]
    with atomic_file(tmp_path / "a.json") as partial:
        partial.write_text("{}")
        partial.chmod(0o600)
    assert events == ["a.json.partial", "rename", tmp_path.name]
    (tmp_path / "plain").touch()
    usual = (tmp_path / "plain").stat().st_mode
    assert {(tmp_path / name).stat().st_mode for name in ("a.json", "epoch_0/a", "epoch_0/part/b")} == {usual}


def test_a_new_folder_has_its_name_on_the_disk(tmp_path, events):
    make_folder(tmp_path / "out" / "run")
    assert events == ["out", tmp_path.name]
    make_folder(tmp_path / "out" / "run")
    assert len(events) == 2


def test_after_an_error_all_is_as_it_was(tmp_path):
    (tmp_path / "epoch_0").mkdir()

    def fail(write):
        with write(tmp_path / "epoch_0") as partial:
            (partial if write is atomic_file else partial / "a").write_text("half")
            raise KeyError

    for write in (atomic_folder, atomic_file):
        with pytest.raises(KeyError):
            fail(write)
    assert list(tmp_path.rglob("*")) == [tmp_path / "epoch_0"]


def test_object_is_empty_where_none_can_be_read(tmp_path):
    (tmp_path / "good").write_text('{"a": 1}')
    assert read_object(tmp_path / "good") == {"a": 1}
    for name, content in {"list": b"[1]", "half": b"{", "bytes": b"\xff\xfe\xff", "deep": b"[" * 10**6}.items():
        (tmp_path / name).write_bytes(content)
        assert read_object(tmp_path / name) == {}
    assert read_object(tmp_path / "none") == read_object(tmp_path) == {}
