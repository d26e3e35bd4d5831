"""Interpolated folders against the formula in plain torch, and as transformers loads them."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from finch.cli import main as cli
from finch.errors import UserError
from finch.weights import wise_ft

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def weights_of(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def is_same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(bits(one[name]), bits(other[name])) for name in one
    )


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


def rewrite(folder, change):
    """Replaces a folder's weights by one file; ``change`` edits the dictionary."""
    weights = weights_of(folder)
    change(weights)
    for file in [*folder.glob("*.safetensors"), *folder.glob("*.index.json")]:
        file.unlink()
    save_file(
        {name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )


@pytest.mark.parametrize("chunk", [2**22, 100])
def test_equals_the_formula_and_loads(folders, tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(wise_ft, "CHUNK", chunk)
    base, tuned = folders
    written = wise_ft.wise_ft(base, tuned, [0.5, 0.3], tmp_path / "out")
    assert written == [tmp_path / "out" / "alpha_0.5", tmp_path / "out" / "alpha_0.3"]
    one, other = weights_of(base), weights_of(tuned)
    for folder, alpha in zip(written, (0.5, 0.3), strict=True):
        expected = {name: ((1 - alpha) * one[name] + alpha * other[name].float()).to(torch.bfloat16) for name in other}
        assert is_same(weights_of(folder), expected)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        assert is_same(dict(model.state_dict()), expected)
        names = {path.name for path in folder.iterdir()}
        assert names == {path.name for path in tuned.iterdir()} - {"training_args.bin"}
        assert (folder / "tokenizer.model").read_bytes() == (tuned / "tokenizer.model").read_bytes()
        for file in folder.glob("*.safetensors"):
            with safe_open(file, "pt") as content:
                assert content.metadata() == {"format": "pt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"alpha_0.5", "alpha_0.3"}


def test_the_end_points_are_bit_for_bit(folders, tmp_path):
    base, tuned = folders

    def awkward(weights):
        norm = weights["model.norm.weight"]
        norm[:4] = torch.tensor([-0.0, torch.inf, torch.nan, 1e-42 if norm.dtype == torch.float32 else 1e-40])

    rewrite(base, awkward)
    rewrite(tuned, lambda weights: weights["model.norm.weight"].neg_())
    zero, one = wise_ft.wise_ft(base, tuned, [0, 1], tmp_path / "out")
    assert is_same(weights_of(one), weights_of(tuned))
    assert is_same(weights_of(zero), {name: tensor.bfloat16() for name, tensor in weights_of(base).items()})
    # The other way round, and with one dtype: the base as it is.
    (zero,) = wise_ft.wise_ft(tuned, base, [0.0], tmp_path / "back")
    assert is_same(weights_of(zero), {name: tensor.float() for name, tensor in weights_of(tuned).items()})
    shutil.copytree(base, tmp_path / "twin")
    rewrite(tmp_path / "twin", lambda weights: weights["model.norm.weight"].fill_(torch.nan))
    (zero,) = wise_ft.wise_ft(base, tmp_path / "twin", [0.0], tmp_path / "same")
    assert is_same(weights_of(zero), weights_of(base))


def test_fp64_stays_fp64_and_integers_are_copied(folders, tmp_path):
    base, tuned = folders
    for folder in folders:

        def change(weights, folder=folder):
            weights["model.norm.weight"] = weights["model.norm.weight"].double() / 3
            weights["counter"] = torch.tensor(2**60 + 1)
            weights["nothing"] = torch.empty(0, 4, dtype=torch.bfloat16)

        rewrite(folder, change)
    (half,) = wise_ft.wise_ft(base, tuned, [0.25], tmp_path / "out")
    found, name = weights_of(half), "model.norm.weight"
    assert torch.equal(found[name], 0.75 * weights_of(base)[name] + 0.25 * weights_of(tuned)[name])
    assert found["counter"].item() == 2**60 + 1
    assert found["nothing"].shape == (0, 4)
    rewrite(tuned, lambda weights: weights["counter"].sub_(1))
    with pytest.raises(
        UserError, match=r"counter differs between --base .* \(int64\) and --tuned .* \(int64\); of these dtypes"
    ):
        wise_ft.wise_ft(base, tuned, [0.5], tmp_path / "new" / "place")
    assert not (tmp_path / "new").exists()


def test_the_command_prints_its_folders_and_needs_no_torchtune(folders, tmp_path):
    base, tuned = map(str, folders)
    arguments = ["wise-ft", "--base", base, "--tuned", tuned, "--alpha", "0.5", "0.25", "--out", str(tmp_path / "out")]
    code = f"import sys; from finch.cli.main import main; main({arguments!r}); assert 'torchtune' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [str(tmp_path / "out" / name) for name in ("alpha_0.5", "alpha_0.25")]
    # alpha is 0.5 unless given
    cli.main(["wise-ft", "--base", base, "--tuned", tuned, "--out", str(tmp_path / "default")])
    assert is_same(weights_of(tmp_path / "default" / "alpha_0.5"), weights_of(tmp_path / "out" / "alpha_0.5"))


def test_a_mistake_is_one_sentence(folders, tmp_path, capsys):
    base, tuned = map(str, folders)
    with pytest.raises(SystemExit) as left:
        cli.main(["wise-ft", "--base", base, "--tuned", tuned, "--alpha", "1.5", "--out", str(tmp_path / "out")])
    assert left.value.code == 1
    assert capsys.readouterr().err.strip().splitlines() == [
        "finch: error: --alpha 1.5 must lie in [0, 1]: it is the tuned model's share, 0.5 in the paper"
    ]


def test_a_tied_head_stored_by_the_tuned_folder_alone(folders, tmp_path):
    base, tuned = folders
    rewrite(base, lambda weights: weights.pop(HEAD))
    (half,) = wise_ft.wise_ft(base, tuned, [0.5], tmp_path / "out")
    one, other = weights_of(base), weights_of(tuned)
    expected = (0.5 * one[EMBEDDING] + 0.5 * other[HEAD].float()).bfloat16()
    assert torch.equal(weights_of(half)[HEAD], expected)


def test_a_tied_head_stored_by_the_base_alone(folders, tmp_path):
    base, tuned = folders
    rewrite(tuned, lambda weights: weights.pop(HEAD))
    with pytest.raises(
        UserError, match=r"has a head of its own, lm_head\.weight, and --tuned .* ties it to model\.embed_tokens"
    ):
        wise_ft.wise_ft(base, tuned, [0.5], tmp_path / "out")
    rewrite(base, lambda weights: weights.update({HEAD: weights[EMBEDDING]}))
    (half,) = wise_ft.wise_ft(base, tuned, [0.5], tmp_path / "out")
    assert weights_of(half).keys() == weights_of(tuned).keys()


def change_config(**changes):
    def change(_, tuned):
        file = tuned / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def only_an_adapter(_, tuned):
    for file in [*tuned.glob("*.safetensors"), *tuned.glob("*.index.json")]:
        file.unlink()
    (tuned / "adapter_config.json").write_text("{}")


def cut(folder):
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda base, tuned: rewrite(tuned, lambda w: w.pop("model.norm.weight")), r"--tuned .*tuned has no model\.norm\.weight, which --base .*base has; give the model that was tuned"),
        (lambda base, tuned: rewrite(base, lambda w: w.pop("model.norm.weight")), r"--base .*base has no model\.norm\.weight, which --tuned"),
        (lambda base, tuned: rewrite(tuned, lambda w: w.update({HEAD: torch.zeros(66, 32)})), r"lm_head\.weight has shape \[64, 32\] in --base .* and \[66, 32\] in --tuned"),
        (lambda base, tuned: (base / "model.safetensors").unlink(), r"--base .*base has neither model\.safetensors nor model\.safetensors\.index\.json; give a Hugging Face"),
        (only_an_adapter, r"--tuned .* has neither .*; merge the adapter into its model first"),
        (lambda base, tuned: next(tuned.glob("*.safetensors")).unlink(), r"--tuned: .*index\.json lists model-0.*safetensors, which is not there"),
        (lambda base, tuned: (tuned / "model.safetensors.index.json").write_text("{}"), r"--tuned: .* is not an index of safetensors"),
        (lambda base, tuned: cut(base), r"--base: .*model\.safetensors is not a whole safetensors file"),
        (lambda base, tuned: (base / "config.json").unlink(), r"--base .*base has no config\.json"),
        (lambda base, tuned: (tuned / "config.json").write_text("{"), r"--tuned: .*config\.json is not JSON"),
        (change_config(num_attention_heads=8), "has num_attention_heads=4, --tuned .* has num_attention_heads=8; give the model"),
        (lambda base, tuned: shutil.rmtree(base), r"--base .*base is not a folder"),
    ],
)  # fmt: skip
def test_folders_that_do_not_fit_are_told_and_nothing_is_written(folders, tmp_path, spoil, message):
    spoil(*folders)
    with pytest.raises(UserError, match=message):
        wise_ft.wise_ft(*folders, [0.5], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("alphas", "message"),
    [
        ([-0.1], r"--alpha -0\.1 must lie in \[0, 1\]"),
        ([0.5, float("nan")], r"--alpha nan must lie in \[0, 1\]"),
        ([0.5, 0.50], r"--alpha 0\.5 is given twice"),
        ([], "--alpha is empty"),
        ([0.25, 0.75], r"alpha_0\.75 exists; remove it or give another --out"),
    ],
)
def test_alphas_out_of_range_or_there_already(folders, tmp_path, alphas, message):
    (tmp_path / "out" / "alpha_0.75").mkdir(parents=True)
    (tmp_path / "out" / "alpha_0.75" / "mine").touch()
    with pytest.raises(UserError, match=message):
        wise_ft.wise_ft(*folders, alphas, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").rglob("*")] == ["alpha_0.75", "mine"]
    wise_ft.wise_ft(*folders, [0.5], tmp_path / "out")  # beside it there is room


def test_an_out_that_is_a_file(folders, tmp_path):
    (tmp_path / "out").touch()
    with pytest.raises(UserError, match="out is a file; give a folder"):
        wise_ft.wise_ft(*folders, [0.5], tmp_path / "out")


@pytest.mark.parametrize(
    ("error", "told"), [(OSError(28, "No space left on device"), UserError), (KeyboardInterrupt(), KeyboardInterrupt)]
)
def test_an_interrupted_run_leaves_nothing(folders, tmp_path, monkeypatch, error, told):
    (tmp_path / "out" / "alpha_0.5.partial").mkdir(parents=True)  # of a run that was killed
    (tmp_path / "out" / "alpha_0.25").mkdir()
    calls = []

    def fail_late(*arguments):
        calls.append(arguments)
        if len(calls) == 5:
            raise error
        return real(*arguments)

    real = wise_ft._blend
    monkeypatch.setattr(wise_ft, "_blend", fail_late)
    with pytest.raises(told) as raised:
        wise_ft.wise_ft(*folders, [0.5, 1.0], tmp_path / "out")
    if told is UserError:
        assert "cannot be written (No space left on device); make room" in str(raised.value)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["alpha_0.25"]
