"""Meta's and torchtune's formats: the weights that torchtune's own checkpointers load, and what is written for them."""

import json
import shutil

import pytest
import torch
from helpers.runs import disk_of_files_below, llama_args, make_config, run_here
from safetensors.torch import load_file
from torchtune.models.convert_weights import tune_to_meta
from torchtune.models.llama2 import llama2
from torchtune.models.llama3_1 import llama3_1
from torchtune.models.llama3_2 import llama3_2
from torchtune.training import FullModelMetaCheckpointer, FullModelTorchTuneCheckpointer

from finch.base.errors import UserError, WriteFailed
from finch.checkpoint.manifest import EXPORTS
from finch.weights.formats import open_checkpoint
from finch.weights.huggingface import HuggingFaceFolder

LLAMA2 = "torchtune.models.llama2.llama2"


@pytest.fixture
def meta(base_folder, tmp_path):
    """A Llama as Meta publishes it in a Hugging Face repository: config.json, and its own files under original/."""
    home = tmp_path / "Llama"
    (home / "original").mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.model"):
        shutil.copy(base_folder / name, home)
    weights = dict(HuggingFaceFolder(str(base_folder)).weights())
    stored = {"rope.freqs": torch.zeros(4), **tune_to_meta(weights)}
    torch.save(stored, home / "original" / "consolidated.00.pth")
    params = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "norm_eps": 1e-5, "vocab_size": 64}
    (home / "original" / "params.json").write_text(json.dumps(params))
    shutil.copy(base_folder / "tokenizer.model", home / "original")
    return home


def block(folder, kind="Meta", files=("consolidated.00.pth",), **changes):
    return {
        "_component_": f"torchtune.training.FullModel{kind}Checkpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": list(files),
        "recipe_checkpoint": None,
        "output_dir": "/tmp/finch-not-used",
        "model_type": "LLAMA2",
        **changes,
    }


def opened(meta, decoder=None, component=LLAMA2):
    """Meta's folder as a run opens it, checked against its model."""
    folder = open_checkpoint(block(meta / "original"))
    folder.check_model(decoder or llama2(**llama_args()), component)
    return folder


def assert_equal(weights, expected):
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def loaded_by_torchtune(checkpointer, folder, files, tmp_path):
    return checkpointer(str(folder), files, "LLAMA2", str(tmp_path / "torchtune")).load_checkpoint()["model"]


def test_meta_weights_equal_torchtunes(base_folder, meta, tmp_path):
    weights = dict(opened(meta).weights())
    expected = loaded_by_torchtune(FullModelMetaCheckpointer, meta / "original", ["consolidated.00.pth"], tmp_path)
    assert_equal(weights, expected)
    assert_equal(weights, dict(HuggingFaceFolder(str(base_folder)).weights()))


@pytest.mark.parametrize("key", ["recipe_checkpoint", "adapter_checkpoint"])
def test_torchtunes_files_of_a_run_are_refused(meta, key):
    with pytest.raises(UserError, match=rf"checkpointer\.{key}=adapter_0\.pt would not be read; leave it out"):
        open_checkpoint(block(meta / "original", **{key: "adapter_0.pt"}))


@pytest.mark.parametrize("is_same_folder", [False, True])
def test_meta_with_config_json_writes_hugging_face(base_folder, meta, tmp_path, is_same_folder):
    home = meta / "original" if is_same_folder else meta
    if is_same_folder:
        (meta / "config.json").rename(home / "config.json")
    folder = open_checkpoint(block(meta / "original"))
    folder.write(folder.weights(), tmp_path / "out", is_writer=True)
    written, original = (load_file(place / "model.safetensors") for place in (tmp_path / "out", base_folder))
    assert_equal(written, original)
    assert (tmp_path / "out" / "tokenizer.model").read_bytes() == (home / "tokenizer.model").read_bytes()
    assert not list((tmp_path / "out").glob("*.pth"))


def test_meta_without_config_json_writes_meta(meta, tmp_path):
    (meta / "config.json").unlink()
    folder, out = opened(meta), tmp_path / "out" / "original"
    out.parent.mkdir()
    folder.write(folder.weights(), out, is_writer=True)
    assert {path.name for path in out.iterdir()} == {"consolidated.00.pth", "params.json", "tokenizer.model", EXPORTS}
    original, written = (torch.load(place / "consolidated.00.pth") for place in (meta / "original", out))
    del original["rope.freqs"]  # torchtune's model computes it
    assert_equal(written, original)
    opened(out.parent)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"norm_eps": 1e-6}, r"norm epsilon 1e-05, params\.json of .* says 1e-06"),
        ({"rope_theta": 5e5}, r"rope base 10000, params\.json of .* says 500000"),
        ({"n_heads": 2}, r"number of attention heads 4, params\.json of .* says 2"),
        ({"n_kv_heads": None}, r"number of key-value heads 2, params\.json of .* says 4"),
        ({"use_scaled_rope": True}, r"rope scaling .1: on. 0, params\.json of .* says 1"),
    ],
)
def test_params_json_is_compared(meta, params, message):
    (meta / "config.json").unlink()
    file = meta / "original" / "params.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **params}))
    with pytest.raises(UserError, match=message):
        opened(meta)
    if "use_scaled_rope" in params:
        opened(meta, llama3_1(**llama_args(), rope_base=10000), "torchtune.models.llama3_1.llama3_1")


def test_meta_stores_a_tied_head(meta, tmp_path):
    file = meta / "original" / "consolidated.00.pth"
    (meta / "config.json").unlink()
    tied = llama3_2(**llama_args(), rope_base=10000, scale_factor=8)
    (meta / "original" / "params.json").unlink()
    with pytest.raises(UserError, match=r"stores a head that differs from the embedding"):
        opened(meta, tied, "torchtune.models.llama3_2.llama3_2")
    stored = torch.load(file)
    stored["output.weight"] = stored["tok_embeddings.weight"].clone()
    torch.save(stored, file)
    folder = opened(meta, tied, "torchtune.models.llama3_2.llama3_2")
    folder.write(tied.state_dict().items(), tmp_path / "out", is_writer=True, dtype=torch.bfloat16)
    written = torch.load(tmp_path / "out" / file.name)
    assert torch.equal(written["output.weight"], tied.tok_embeddings.weight.bfloat16())
    assert written.keys() == stored.keys() - {"rope.freqs"}


@pytest.mark.parametrize("with_config", [False, True])
def test_torchtunes_own_format(base_folder, tmp_path, with_config):
    weights = dict(HuggingFaceFolder(str(base_folder)).weights())
    (tmp_path / "tuned").mkdir()
    torch.save(weights, tmp_path / "tuned" / "model.pt")
    if with_config:
        shutil.copy(base_folder / "config.json", tmp_path / "tuned")
    folder = open_checkpoint(block(tmp_path / "tuned", "TorchTune", ["model.pt"]))
    folder.check_model(llama2(**llama_args()), LLAMA2)
    expected = loaded_by_torchtune(FullModelTorchTuneCheckpointer, tmp_path / "tuned", ["model.pt"], tmp_path)
    assert_equal(dict(folder.weights()), expected)
    folder.write(weights.items(), tmp_path / "out", is_writer=True)
    if with_config:
        assert_equal(load_file(tmp_path / "out" / "model.safetensors"), load_file(base_folder / "model.safetensors"))
    else:
        assert_equal(torch.load(tmp_path / "out" / "model.pt"), expected)


def test_full_disk_is_a_write_failure(base_folder, tmp_path):
    """torch.save raises a RuntimeError on a full disk."""
    weights = dict(HuggingFaceFolder(str(base_folder)).weights())
    torch.save(weights, tmp_path / "model.pt")
    folder = open_checkpoint(block(tmp_path, "TorchTune", ["model.pt"]))
    with disk_of_files_below(30_000), pytest.raises(WriteFailed, match=r"model\.pt could not be written completely"):
        folder.write(weights.items(), tmp_path / "out", is_writer=True)
    assert not list(tmp_path.glob("out*"))


def test_run_from_meta_equals_run_from_hugging_face(base_folder, meta, rows_file, tmp_path, trained):
    config = make_config(base_folder, rows_file, tmp_path / "run", epochs=1, max_steps_per_epoch=3)
    one, other = trained(config), run_here(tmp_path, {**config, "checkpointer": block(meta / "original")})
    assert other.returncode == 0, other.output
    assert one.column("loss") == other.column("loss")
    assert_equal(*(load_file(run.folder / "epoch_0" / "model.safetensors") for run in (one, other)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_component_": "torch.optim.AdamW"}, "torch.optim.AdamW is not supported by this recipe; use torchtune.trai"),
        ({"_component_": "torchtune.training.FullModelMetaCheckpoint"}, "did you mean"),
        ({"checkpoint_dir": "/nowhere"}, "checkpoint_dir=/nowhere is not a folder"),
        (
            {"checkpoint_files": ["consolidated.01.pth"]},
            r"has no consolidated\.01\.pth, which checkpointer.checkpoint_files names",
        ),
        ({"checkpoint_files": ["a", "b"]}, "must name one file in this format; for weights in several files give"),
    ],
)
def test_open_checkpoint_refuses_wrong_blocks(meta, changes, message):
    with pytest.raises(UserError, match=message):
        open_checkpoint({**block(meta / "original"), **changes})


def test_broken_files_are_refused(meta):
    (meta / "config.json").unlink()
    file = meta / "original" / "consolidated.00.pth"
    for stored, message in (
        ({"model": {}}, "holds model, which is not a weight"),
        ({"encoder.weight": torch.zeros(3)}, r"holds encoder\.weight of shape \[3\], which does not belong to a model"),
    ):
        torch.save(stored, file)
        with pytest.raises(UserError, match=message):
            open_checkpoint(block(meta / "original")).check_shapes(llama2(**llama_args()))
    (meta / "original" / "params.json").write_text("{")
    with pytest.raises(UserError, match=r"params\.json is not JSON"):
        open_checkpoint(block(meta / "original"))


@pytest.mark.parametrize(
    "component", ["torchtune.training.FullModelHFCheckpointer", "finch.weights.huggingface.HuggingFaceFolder"]
)
def test_open_checkpoint_opens_hugging_face_folders(base_folder, component):
    assert type(open_checkpoint({"_component_": component, "checkpoint_dir": str(base_folder)})) is HuggingFaceFolder
