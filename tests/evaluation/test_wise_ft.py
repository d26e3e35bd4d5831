"""Interpolated folders against the formula in plain torch, and as transformers loads them."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from helpers.runs import disk_of_files_below
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finch.base import run_files
from finch.base.errors import UserError
from finch.checkpoint.manifest import EXPORTS
from finch.cli import main as cli
from finch.evaluation import wise_ft

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


def read(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def is_same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(bits(one[name]), bits(other[name])) for name in one
    )


def rewrite(folder, change):
    """Replaces a folder's weights by one file; ``change`` edits the dictionary."""
    weights = read(folder)
    change(weights)
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    copies = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(copies, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def folders(base_folder, tmp_path):
    """(base in fp32 and one file, tuned in bf16 and several shards); the tuned one as transformers saves it."""
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    shutil.copytree(base_folder, base)
    model = AutoModelForCausalLM.from_pretrained(base).to(torch.bfloat16)
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tuned, max_shard_size="12KB")
    shutil.copy(base / "tokenizer.model", tuned)
    (tuned / "training_args.bin").write_bytes(b"no weights")
    assert len(list(tuned.glob("*.safetensors"))) > 3
    return base, tuned


def test_wise_ft_equals_the_formula_and_loads(folders, tmp_path):
    base, tuned = folders
    (tmp_path / "out" / "alpha_0.5.partial" / "stale").mkdir(parents=True)  # of a run that was killed
    written = wise_ft.wise_ft(base, tuned, [0.5, 0.3], tmp_path / "out")
    assert written == [tmp_path / "out" / "alpha_0.5", tmp_path / "out" / "alpha_0.3"]
    theta_0, theta_ft = read(base), read(tuned)
    for folder, alpha in zip(written, (0.5, 0.3), strict=True):
        blend = {name: (1 - alpha) * theta_0[name] + alpha * theta_ft[name].float() for name in theta_ft}
        expected = {name: tensor.to(torch.bfloat16) for name, tensor in blend.items()}
        assert is_same(read(folder), expected)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert is_same(dict(model.state_dict()), expected)
        files, tuned_files = ({path.name for path in place.iterdir()} for place in (folder, tuned))
        assert files == tuned_files - {"training_args.bin"} | {EXPORTS}
        assert (folder / "tokenizer.model").read_bytes() == (tuned / "tokenizer.model").read_bytes()
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as shard, safe_open(tuned / file.name, "pt") as tuned_shard:
                assert shard.metadata() == {"format": "pt"}
                assert set(shard.keys()) == set(tuned_shard.keys())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"alpha_0.5", "alpha_0.3"}


def test_wise_ft_of_a_sweep_is_each_cells(folders, tmp_path):
    base, tuned = folders
    for name in ("a", "b"):
        shutil.copytree(tuned, tmp_path / "sweep" / name / "epoch_0")
        (tmp_path / "sweep" / name / "cell.json").write_text("{}")
    written = wise_ft.wise_ft(base, tmp_path / "sweep", [0.3], tmp_path / "out")
    assert written == [tmp_path / "out" / name / "alpha_0.3" for name in ("a", "b")]
    [of_a_model] = wise_ft.wise_ft(base, tuned, [0.3], tmp_path / "one")
    assert all(is_same(read(folder), read(of_a_model)) for folder in written)


def test_wise_ft_end_points_are_bit_for_bit(folders, tmp_path):
    base, tuned = folders

    def add_special_values(weights):
        norm = weights[NORM]
        norm[:4] = torch.tensor([-0.0, torch.inf, torch.nan, 1e-42 if norm.dtype == torch.float32 else 1e-40])

    rewrite(base, add_special_values)
    rewrite(tuned, lambda weights: weights[NORM].neg_())
    zero, one = wise_ft.wise_ft(base, tuned, [0, 1], tmp_path / "out")
    assert is_same(read(one), read(tuned))
    assert is_same(read(zero), {name: tensor.bfloat16() for name, tensor in read(base).items()})
    # The other way round, and with one dtype: the base as it is.
    (zero,) = wise_ft.wise_ft(tuned, base, [0.0], tmp_path / "back")
    assert is_same(read(zero), {name: tensor.float() for name, tensor in read(tuned).items()})
    shutil.copytree(base, tmp_path / "twin")
    rewrite(tmp_path / "twin", lambda weights: weights[NORM].fill_(torch.nan))
    (zero,) = wise_ft.wise_ft(base, tmp_path / "twin", [0.0], tmp_path / "same")
    assert is_same(read(zero), read(base))


def test_wise_ft_blends_fp64_in_fp64_and_copies_integers(folders, tmp_path):
    base, tuned = folders
    others = {"counter": torch.tensor(2**60 + 1), "empty": torch.empty(0, 4, dtype=torch.bfloat16)}
    for folder in folders:
        rewrite(folder, lambda weights: weights.update({NORM: weights[NORM].double() / 3, **others}))
    (quarter,) = wise_ft.wise_ft(base, tuned, [0.25], tmp_path / "out")
    weights = read(quarter)
    assert torch.equal(weights[NORM], 0.75 * read(base)[NORM] + 0.25 * read(tuned)[NORM])
    assert weights["counter"].item() == 2**60 + 1
    assert weights["empty"].shape == (0, 4)
    rewrite(tuned, lambda weights: weights["counter"].sub_(1))
    message = r"counter differs between --base=.* \(I64\) and --tuned=.* \(I64\), and only F64"
    with pytest.raises(UserError, match=message):
        wise_ft.wise_ft(base, tuned, [0.5], tmp_path / "new" / "place")
    assert not (tmp_path / "new").exists()


def test_command_prints_its_folders_and_needs_no_torchtune(folders, tmp_path, monkeypatch):
    base, tuned = map(str, folders)
    arguments = ["average", "--base", base, "--tuned", tuned, "--alpha", "0.5", "0.25", "--out", str(tmp_path / "out")]
    code = f"import sys; from finch.cli.main import main; main({arguments!r}); assert 'torchtune' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(tmp_path / "out" / name) for name in ("alpha_0.5", "alpha_0.25")]
    # alpha is 0.5, and OUT a folder here, unless given
    monkeypatch.chdir(tmp_path)
    cli.main(["average", "--base", base, "--tuned", tuned])
    assert is_same(read(tmp_path / "average" / "alpha_0.5"), read(tmp_path / "out" / "alpha_0.5"))


def test_tied_head_stored_by_one_folder_only(folders, tmp_path):
    base, tuned = folders
    rewrite(base, lambda weights: weights.pop(HEAD))
    (half,) = wise_ft.wise_ft(base, tuned, [0.5], tmp_path / "out")
    expected = (0.5 * read(base)[EMBEDDING] + 0.5 * read(tuned)[HEAD].float()).bfloat16()
    assert torch.equal(read(half)[HEAD], expected)
    # Only by the base: refused unless it is a copy of the embedding.
    rewrite(base, lambda weights: weights.update({HEAD: 2 * weights[EMBEDDING]}))
    rewrite(tuned, lambda weights: weights.pop(HEAD))
    message = r"has its own output layer lm_head\.weight, --tuned=.* ties it to model\.embed_tokens"
    with pytest.raises(UserError, match=message):
        wise_ft.wise_ft(base, tuned, [0.5], tmp_path / "tied")
    rewrite(base, lambda weights: weights.update({HEAD: weights[EMBEDDING]}))
    (half,) = wise_ft.wise_ft(base, tuned, [0.5], tmp_path / "tied")
    assert read(half).keys() == read(tuned).keys()


def change_config(**changes):
    def change(_, tuned):
        file = tuned / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def keep_only_an_adapter(_, tuned):
    for file in [*tuned.glob("*.safetensors"), *tuned.glob("*.index.json")]:
        file.unlink()
    (tuned / "adapter_config.json").write_text("{}")


def truncate(folder):
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda base, tuned: rewrite(tuned, lambda w: w.pop(NORM)), r"--tuned=.*tuned has no model\.norm\.weight, which --base=.*base has; give the model that was tuned"),
        (lambda base, tuned: rewrite(base, lambda w: w.pop(NORM)), r"--base=.*base has no model\.norm\.weight, which --tuned="),
        (lambda base, tuned: rewrite(tuned, lambda w: w.update({HEAD: torch.zeros(66, 32)})), r"lm_head\.weight has shape \[64, 32\] in --base=.* and \[66, 32\] in --tuned="),
        (lambda base, tuned: (base / "model.safetensors").unlink(), r"--base=.*base has neither model\.safetensors nor model\.safetensors\.index\.json; give a Hugging Face"),
        (keep_only_an_adapter, r"--tuned=.* has neither .*; merge the adapter into its model first"),
        (lambda base, tuned: next(tuned.glob("*.safetensors")).unlink(), r"tuned/model\.safetensors\.index\.json lists model-0.*safetensors, which is not in .*; download the missing"),
        (lambda base, tuned: (tuned / "model.safetensors.index.json").write_text("{}"), r"tuned/.* has no weight_map of safetensors files"),
        (lambda base, tuned: (tuned / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../base/model.safetensors"}}'), r"lists \.\./base/model\.safetensors, which is not the name of a file"),
        (lambda base, tuned: truncate(base), r"base/model\.safetensors is not a complete safetensors file"),
        (lambda base, tuned: (base / "config.json").unlink(), r"--base=.*base has no config\.json"),
        (lambda base, tuned: (tuned / "config.json").write_text("{"), r"tuned/config\.json is not JSON"),
        (change_config(num_attention_heads=8), "has num_attention_heads=4, --tuned=.* has num_attention_heads=8; give the model"),
        (change_config(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "has rope_theta=.*, --tuned=.* has rope_theta=500000.0; give the model"),
        (change_config(rms_norm_eps=1e-2), "has rms_norm_eps=.*, --tuned=.* has rms_norm_eps=0.01; give the model"),
        (change_config(hidden_act="gelu"), "has hidden_act=silu, --tuned=.* has hidden_act=gelu; give the model"),
        (change_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 2e4}), "has rope_type=default, --tuned=.* has rope_type=linear"),
        (lambda base, tuned: shutil.rmtree(base), r"--base=.*base is not a folder"),
        (lambda base, tuned: (base.parent / "out").touch(), "out is a file; give a folder"),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_are_refused(folders, tmp_path, spoil, message):
    spoil(*folders)
    with pytest.raises(UserError, match=message):
        wise_ft.wise_ft(*folders, [0.5], tmp_path / "out")
    assert not (tmp_path / "out").is_dir()


@pytest.mark.parametrize(
    ("alphas", "message"),
    [
        ([-0.1], r"--alpha=-0\.1 must be in \[0, 1\]: it is the tuned model's weight, 0\.5 in the paper"),
        ([0.5, float("nan")], r"--alpha=nan must be in \[0, 1\]"),
        ([0.5, 0.50], r"--alpha=0\.5 is given twice"),
        ([], "--alpha is empty"),
        ([0.25, 0.75], r"alpha_0\.75 exists; remove it or give another --out"),
    ],
)
def test_alphas_out_of_range_or_written_already_are_refused(folders, tmp_path, alphas, message):
    (tmp_path / "out" / "alpha_0.75").mkdir(parents=True)
    (tmp_path / "out" / "alpha_0.75" / "other").touch()
    with pytest.raises(UserError, match=message):
        wise_ft.wise_ft(*folders, alphas, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["alpha_0.75", "other"]
    wise_ft.wise_ft(*folders, [0.5], tmp_path / "out")  # other alphas are written next to it


def test_full_disk_leaves_no_folder(folders, tmp_path):
    base, tuned = folders
    (tmp_path / "out" / "alpha_0.25").mkdir(parents=True)
    message = r"\S+ cannot be written \(.*File too large.*\); make room"
    limit = max(file.stat().st_size for file in tuned.iterdir()) // 2
    with disk_of_files_below(limit), pytest.raises(UserError, match=message):
        wise_ft.wise_ft(base, tuned, [0.5, 1.0], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["alpha_0.25"]


def test_interrupt_leaves_no_folder(folders, tmp_path, monkeypatch):
    calls = []

    def interrupt_third_call(*arguments):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        save_file(*arguments)

    monkeypatch.setattr("finch.evaluation.wise_ft.save_file", interrupt_third_call)
    with pytest.raises(KeyboardInterrupt):
        wise_ft.wise_ft(*folders, [0.5, 1.0], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_models_in_runs_sweeps_averages_and_interpolations(tmp_path):
    def model(*names):
        folder = tmp_path.joinpath(*names)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        return folder

    cells = [tmp_path / "sweep" / name for name in ("a", "b", "untrained")]
    for cell in cells:
        cell.mkdir(parents=True)
        (cell / run_files.CELL).write_text("{}")
        if cell.name != "untrained":
            model("sweep", cell.name, "epoch_0")
    averaged = model("sweep", "a", "average", "model")
    blends = [model("out", f"alpha_{alpha}") for alpha in (0.3, 0.6)]
    blended_cells = [model("blends", cell, "alpha_0.5") for cell in "ab"]
    assert wise_ft.models_in(tmp_path / "sweep") == cells[:2]
    assert wise_ft.models_in(cells[0]) == [cells[0]]
    assert wise_ft.models_in(cells[0] / "average") == wise_ft.models_in(averaged) == [averaged]
    assert wise_ft.models_in(tmp_path / "out") == blends
    assert wise_ft.models_in(tmp_path / "blends") == blended_cells
    assert wise_ft.models_in(tmp_path / "none") == [tmp_path / "none"]
