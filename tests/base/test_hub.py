"""Names on the hub: which they are, what is downloaded, what a cache is good for, and what fails in one line."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.hub_server import TOKEN, hub_server
from huggingface_hub import constants, file_download

from finch.base import hub
from finch.base.errors import Unavailable, UserError
from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys
from finch.evaluation.foreign import offline, read_config_of

MODEL = {
    "config.json": b"{}",
    "generation_config.json": b"{}",
    "model.safetensors.index.json": b"{}",
    "model-00001-of-00002.safetensors": b"a" * 20_000,
    "model-00002-of-00002.safetensors": b"b",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"",
}
OTHERS = dict.fromkeys(("README.md", "pytorch_model.bin", "consolidated.safetensors", "original/model.pth"), b"x")


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(file_download.time, "sleep", lambda _: None)
    hub._find.cache_clear()
    with hub_server(monkeypatch, tmp_path / "cache") as started:
        yield started
    hub._find.cache_clear()


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def again(key, value):
    """As another process finds it."""
    hub._find.cache_clear()
    return hub.local_path(key, value)


def test_model_is_downloaded_once_without_what_nobody_needs(server):
    commit = server.add("models/Acme/Tiny", {**MODEL, **OTHERS})
    folder = hub.local_path("model_dir", "Acme/Tiny")
    assert files_of(folder) == MODEL
    assert (Path(folder).name, hub.origin(folder), hub.name_of(Path(folder))) == (commit, f"Acme/Tiny@{commit}", "Tiny")
    assert again("--base", "Acme/Tiny") == folder
    assert server.downloads("model-00001-of-00002.safetensors") == 1


def test_revision_is_the_one_that_is_named(server):
    old = server.add("models/Acme/Tiny", MODEL)
    new = server.add("models/Acme/Tiny", {**MODEL, "config.json": b'{"a": 1}'})
    assert Path(hub.local_path("model_dir", f"Acme/Tiny@{old}")).name == old
    assert Path(hub.local_path("model_dir", "Acme/Tiny@main")).name == new
    assert server.downloads("model-00001-of-00002.safetensors") == 1  # the same content


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("model_dir", value) for value in ("./Acme/Tiny", "/Acme/Tiny", "~/Tiny", "Tiny", "a/b/c", "https://x/y", "", 3)),
        ("model_dir", "here/Tiny"),
        ("tokenizer.path", "Acme/tokenizer.json"),
        ("output_dir", "Acme/Tiny"),
        ("data_files", "Acme/Tiny"),
        ("data_files", "hf://buckets/x"),
        ("data_files", ["rows/*.jsonl", "s3://bucket/rows.jsonl"]),
    ],
)  # fmt: skip
def test_what_is_no_name_on_the_hub_stays(server, tmp_path, key, value):
    (tmp_path / "here" / "Tiny").mkdir(parents=True)
    assert hub.local_path(key, value) == value
    assert server.requests == []


def test_rows_are_files_of_the_commit(server):
    rows = {"data/a.jsonl": b"1", "data/b.jsonl": b"2", "c.jsonl": b"3"}
    server.add("datasets/Acme/Rows", rows)
    commit = server.add("datasets/Acme/Rows", {**rows, "data/a.jsonl": b"4"})
    name = "hf://datasets/Acme/Rows"
    one, many = hub.local_path("probes.own.data_files", [f"{name}/c.jsonl", f"{name}@main/data/*.jsonl"])
    assert Path(one).read_bytes() == b"3"
    assert [path.read_bytes() for path in sorted(Path(many).parent.glob("*.jsonl"))] == [b"4", b"2"]
    assert hub.origin(many) == f"Acme/Rows@{commit}"


def test_config_has_paths_where_the_command_line_leaves_them(server):
    server.add("models/Acme/Tiny", MODEL)
    server.add("datasets/Acme/Rows", {"a.jsonl": b"1"})
    blocks = {
        "model_dir": "Acme/Absent",
        "dataset": {"data_files": ["hf://datasets/Acme/Rows/a.jsonl", "x"]},
        "epochs": 2,
    }
    blocks, [model, lr] = hub.local_paths(blocks, ["model_dir=Acme/Tiny", "optimizer.lr=1e-4"])
    folder, rows = (
        hub.local_path("model_dir", "Acme/Tiny"),
        hub.local_path("data_files", "hf://datasets/Acme/Rows/a.jsonl"),
    )
    assert (model, lr) == (f'model_dir="{folder}"', "optimizer.lr=1e-4")
    assert blocks == {"model_dir": "Acme/Absent", "dataset": {"data_files": [rows, "x"]}, "epochs": 2}
    name = "hf://datasets/Acme/Rows/a.jsonl"
    assert hub.local_paths({}, [f"dataset.data_files=[{name}, y]"])[1] == [f'dataset.data_files=["{rows}", "y"]']


def test_what_is_mistyped_is_told_before_weights_are_downloaded(server, base_folder, rows_file):
    server.add("models/Acme/Tiny", files_of(base_folder))
    words = ["--config", "auto", "model_dir=Acme/Tiny", f"data_files={rows_file}", "epochs=2"]
    with pytest.raises(UserError, match=r"unknown key epoch=2, did you mean epochs"):
        read([*words, "epoch=2"], FullFinetuneKeys)
    assert (server.downloads("config.json"), server.downloads("model.safetensors")) == (1, 0)
    assert (Path(read(words, FullFinetuneKeys).model_dir) / "model.safetensors").is_file()


def test_a_cut_download_goes_on_or_is_one_line(server):
    server.add("models/Acme/Tiny", MODEL)
    server.cuts = 1
    assert files_of(hub.local_path("model_dir", "Acme/Tiny")) == MODEL
    server.add("models/Acme/Large", {**MODEL, "model-00001-of-00002.safetensors": b"c" * 20_000})
    server.cuts = sys.maxsize
    with pytest.raises(
        Unavailable,
        match=rf"^model_dir=Acme/Large is no folder here, and {server.url} fails \(peer closed .*; start again",
    ):
        hub.local_path("model_dir", "Acme/Large")
    server.cuts = 0
    assert len(files_of(hub.local_path("model_dir", "Acme/Large"))) == len(MODEL)


def test_part_of_a_snapshot_is_named_and_not_used(server):
    server.add("models/Acme/Tiny", MODEL)
    folder = Path(hub.local_path("model_dir", "Acme/Tiny"))
    (folder / "generation_config.json").unlink()  # nothing but the answers would differ
    server.refusal = "down"
    with pytest.raises(UserError, match=r"and the cache has only a part of Acme/Tiny, and .* cannot be reached"):
        again("model_dir", "Acme/Tiny")
    server.refusal = None
    assert files_of(again("model_dir", "Acme/Tiny")) == MODEL


@pytest.mark.parametrize("reason", ["offline", "down", "unknown"])
def test_a_complete_copy_needs_no_hub(server, monkeypatch, reason):
    server.add("models/Acme/Tiny", MODEL)
    folder = hub.local_path("model_dir", "Acme/Tiny")
    number = len(server.requests)
    server.refusal = reason
    if reason == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("Acme/Tiny", f"Acme/Tiny@{Path(folder).name}"):
        assert again("model_dir", name) == folder
    assert reason != "offline" or len(server.requests) == number


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ("unknown", "has no model of that name for this login (404); correct it, or set HF_TOKEN"),
        ("token", "has no model of that name for this login (401); correct it, or set HF_TOKEN"),
        ("gated", "Acme/Tiny is gated: accept its terms at URL/Acme/Tiny, and set HF_TOKEN"),
        ("revision", "Acme/Tiny has no revision v2 at URL; correct what follows @"),
        ("down", "fails (Server error '503 Service Unavailable' for url 'URL/api/models/Acme/Tiny/revision/v2')"),
    ],
)
def test_what_the_hub_refuses_is_one_line(server, refusal, message):
    server.refusal = refusal
    with pytest.raises(UserError, match=re.escape(message.replace("URL", server.url))) as caught:
        hub.local_path("model_dir", "Acme/Tiny@v2")
    assert str(caught.value).startswith("model_dir=Acme/Tiny@v2 is no folder here, and ")
    assert isinstance(caught.value, Unavailable) is (refusal == "down")


def test_gated_model_is_read_with_the_token(server, monkeypatch):
    server.add("models/Acme/Tiny", MODEL)
    server.gated.add("models/Acme/Tiny")
    with pytest.raises(UserError, match="is gated"):
        hub.local_path("model_dir", "Acme/Tiny")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert files_of(hub.local_path("model_dir", "Acme/Tiny")) == MODEL


def test_full_disk_is_one_line_before_it_is_filled(server, monkeypatch):
    server.add("models/Acme/Tiny", MODEL)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(
        Unavailable, match=r"hub cannot be written \(Not enough free disk space .*; make room, or set HF_HOME"
    ):
        hub.local_path("model_dir", "Acme/Tiny")


def test_disk_that_fills_up_is_one_line(server, monkeypatch):
    server.add("models/Acme/Tiny", MODEL)

    def fill(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_download, "http_get", fill)
    with pytest.raises(
        Unavailable, match=r"hub cannot be written \(No space left on device\); make room, or set HF_HOME"
    ):
        hub.local_path("model_dir", "Acme/Tiny")


def test_without_a_network_one_line_comes_at_once(server, monkeypatch):
    server.shutdown()  # else its poll keeps the socket open for a moment, which then resets a connection in place of refusing it
    server.server_close()
    monkeypatch.setattr(file_download.time, "sleep", lambda _: pytest.fail("it waits"))
    for key, value in (("model_dir", "Acme/Tiny"), ("data_files", "hf://datasets/Acme/Rows/a.jsonl")):
        with pytest.raises(
            Unavailable, match=rf"^{key}={value}.* {server.url} fails \(.*Connection refused\); start again"
        ):
            hub.local_path(key, value)
    with pytest.raises(Unavailable, match=r"^dataset\.source=Acme/Rows: .* fails \(.*Connection refused\)"):
        hub.pinned("dataset.source", "Acme/Rows")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="has no copy of Acme/Tiny, and HF_HUB_OFFLINE=1"):
        hub.local_path("model_dir", "Acme/Tiny")


def test_data_set_gets_its_commit(server, monkeypatch, tmp_path):
    commit = server.add("datasets/Acme/Rows", {"a.jsonl": b"1"})
    assert hub.pinned("source", "Acme/Rows") == hub.pinned("source", f"Acme/Rows@{commit}") == f"Acme/Rows@{commit}"
    (tmp_path / "here" / "rows").mkdir(parents=True)
    assert [hub.pinned("source", name) for name in ("json", "here/rows", None)] == ["json", "here/rows", None]
    with pytest.raises(UserError, match=r"^source=Acme/None: .* has no dataset of that name"):
        hub.pinned("source", "Acme/None")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert hub.pinned("source", "Acme/Rows") == "Acme/Rows"


def test_ranks_that_start_at_once_share_one_download(server, tmp_path):
    server.add("models/Acme/Tiny", MODEL)
    server.awaited = 2
    code = "from finch.base.hub import local_path; print(local_path('model_dir', 'Acme/Tiny'))"
    environment = {
        **os.environ,
        "HF_ENDPOINT": server.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_CACHE": constants.HF_HUB_CACHE,
    }
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) for _ in "01"
    ]
    folders = {rank.communicate(timeout=100)[0].strip() for rank in ranks}
    assert len(folders) == 1
    assert files_of(folders.pop()) == MODEL
    assert server.downloads("model-00001-of-00002.safetensors") == 1


def test_names_in_the_files_of_a_run_are_not_looked_up(server, tmp_path):
    server.add("models/Acme/Tiny", MODEL)
    (tmp_path / "config.yaml").write_text("checkpointer: {checkpoint_dir: Acme/Tiny}\n")
    for trust in (False, True):
        assert read_config_of(tmp_path, trust=trust)["checkpointer"]["checkpoint_dir"] == "Acme/Tiny"
    assert server.requests == []
    with offline(), pytest.raises(Unavailable, match="files of a run may not name other machines"):
        hub.local_path("model_dir", "Acme/Tiny")
    assert server.requests == []
