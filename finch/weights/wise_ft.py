"""WiSE-FT: a model between the pretrained and the tuned one, theta = (1 - alpha) * theta0 + alpha * theta_ft.

"Robust fine-tuning of zero-shot models" (Wortsman et al., 2022). Made after training, from two Hugging Face folders,
for all parameters, in fp32, and cast once to the dtype of the tuned folder.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open

from finch.errors import UserError

INDEX = "model.safetensors.index.json"
ONLY_FILE = "model.safetensors"
# Weights in any format: not copied. The index is, since the files keep their names and layout.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".bin.index.json")
CHUNK = 2**22
"""Elements blended at a time: memory does not grow with the model."""

_BLENDED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What config.json says about the use of weights that their shapes do not show.
_MUST_AGREE = ("model_type", "num_attention_heads", "num_key_value_heads", "rope_theta")


def wise_ft(base: str | Path, tuned: str | Path, alphas: Sequence[float], out: str | Path) -> list[Path]:
    """Writes a Hugging Face folder OUT/alpha_A for each alpha, in one pass over both models' weights.

    A folder has the tuned one's files: config, tokenizer, index, and weights under the same names, in the same shards
    and dtypes. alpha 0 is the base (cast to these dtypes), alpha 1 the tuned model, bit for bit. Weights are mapped
    into memory and blended in pieces of ``CHUNK`` elements. All folders are written beside their places and renamed
    once all are whole; after an error none is there.

    A head tied to the embedding may be stored in one of the two folders only: where the base does not store it, its
    embedding takes part in its place; where the tuned one does not, the base's must be a copy of its embedding.

    Args:
        base: the pretrained model's folder, with safetensors.
        tuned: the tuned model's folder, with safetensors.
        alphas: the tuned model's shares, each in [0, 1]; 0.5 in the paper.
        out: folder of the folders; made if it is not there.

    Returns:
        The folders written, in the order of ``alphas``.

    Raises:
        UserError: alpha out of range or given twice, a folder that is there already, a missing or broken file, names,
            shapes or settings in which the models differ, a disk that is full.
    """
    base, tuned, out = Path(base), Path(tuned), Path(out)
    targets = _targets(alphas, out)
    with contextlib.ExitStack() as stack:
        theirs, ours = _Weights(base, "base", stack), _Weights(tuned, "tuned", stack)
        _check_configs(base, tuned)
        partner = _partners(theirs, ours)
        partials = [target.with_name(target.name + ".partial") for target in targets]
        made = [folder for folder in (out, *out.parents) if not folder.exists()]
        whole: list[Path] = []
        try:
            for partial in partials:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                _copy_the_rest(tuned, partial)
            for file in ours.files:
                _blend_file(file, theirs, ours, partner, dict(zip(partials, alphas, strict=True)))
            for partial, target in zip(partials, targets, strict=True):
                partial.rename(target)
                whole.append(target)
        except BaseException as error:
            for folder in (*partials, *whole):
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # something else has come to lie there
                for folder in made:
                    folder.rmdir()
            if isinstance(error, OSError):
                raise UserError(
                    f"--out {out} cannot be written ({error.strerror}); make room or give another place"
                ) from error
            raise
    return targets


class _Weights:
    """A folder's tensors by name, mapped and not read.

    Args:
        option: the command's option the folder was given by, for messages.
        stack: closes the files.
    """

    def __init__(self, folder: Path, option: str, stack: contextlib.ExitStack) -> None:
        self.folder, self.option = folder, option
        if not folder.is_dir():
            raise UserError(f"--{option} {folder} is not a folder; correct the path")
        self.files = self._files()
        self._by_name: dict[str, Any] = {}
        for file in self.files:
            try:
                content = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except Exception as error:  # the library has a class of its own for each way a file can be broken
                raise UserError(
                    f"--{option}: {file} is not a whole safetensors file ({' '.join(str(error).split())}); write or download it again"
                ) from error
            self._by_name.update(dict.fromkeys(content.keys(), content))

    def names(self) -> set[str]:
        return set(self._by_name)

    def shape(self, name: str) -> list[int]:
        return self._by_name[name].get_slice(name).get_shape()

    def flat(self, name: str) -> torch.Tensor:
        return self._by_name[name].get_tensor(name).flatten()

    def _files(self) -> list[Path]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise UserError(
                    f"--{self.option}: {index} is not an index of safetensors; download it again"
                ) from error
        else:
            names = [ONLY_FILE]
            if not (self.folder / ONLY_FILE).is_file():
                adapter = (self.folder / "adapter_config.json").is_file()
                remedy = (
                    "merge the adapter into its model first"
                    if adapter
                    else "give a Hugging Face folder with safetensors"
                )
                raise UserError(f"--{self.option} {self.folder} has neither {ONLY_FILE} nor {INDEX}; {remedy}")
        for name in names:
            if not (self.folder / name).is_file():
                raise UserError(
                    f"--{self.option}: {index} lists {name}, which is not there; download the missing shard"
                )
        return [self.folder / name for name in names]


def _targets(alphas: Sequence[float], out: Path) -> list[Path]:
    targets = []
    if not alphas:
        raise UserError("--alpha is empty; give at least one share in [0, 1], such as 0.5")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a folder")
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise UserError(f"--alpha {alpha:g} must lie in [0, 1]: it is the tuned model's share, 0.5 in the paper")
        target = out / f"alpha_{alpha:g}"
        if target in targets:
            raise UserError(f"--alpha {alpha:g} is given twice; give each share once")
        if target.exists():
            raise UserError(f"{target} exists; remove it or give another --out")
        targets.append(target)
    return targets


def _check_configs(base: Path, tuned: Path) -> None:
    configs = []
    for option, folder in (("base", base), ("tuned", tuned)):
        try:
            configs.append(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except FileNotFoundError as error:
            raise UserError(
                f"--{option} {folder} has no config.json; give a folder in Hugging Face's format"
            ) from error
        except ValueError as error:
            raise UserError(f"--{option}: {folder / 'config.json'} is not JSON ({error}); download it again") from error
    for key in _MUST_AGREE:
        one, other = configs[0].get(key), configs[1].get(key)
        if one is not None and other is not None and one != other:
            raise UserError(
                f"--base {base} has {key}={one}, --tuned {tuned} has {key}={other}; give the model that was tuned as the base"
            )


def _partners(base: _Weights, tuned: _Weights) -> dict[str, str]:
    """The tuned folder's names, and what each is blended with in the base."""
    partner = {name: name for name in tuned.names()}
    for name in sorted(tuned.names() ^ base.names()):
        holder, other = (base, tuned) if name in base.names() else (tuned, base)
        embedding = _embedding_of(name, holder.names())
        if embedding is None or embedding not in other.names():
            raise UserError(
                f"--{other.option} {other.folder} has no {name}, which --{holder.option} {holder.folder} has; give the model that was tuned as the base"
            )
        if holder is tuned:
            partner[name] = embedding
        elif not _same(base.flat(name), base.flat(embedding)):
            raise UserError(
                f"--base {base.folder} has a head of its own, {name}, and --tuned {tuned.folder} ties it to {embedding}; "
                "give the model that was tuned as the base"
            )
    for name, other_name in partner.items():
        if base.shape(other_name) != tuned.shape(name):
            raise UserError(
                f"{name} has shape {base.shape(other_name)} in --base {base.folder} and {tuned.shape(name)} in --tuned {tuned.folder}; "
                "give the model that was tuned as the base"
            )
    return partner


def _embedding_of(name: str, names: set[str]) -> str | None:
    """The embedding that a head can be tied to."""
    embeddings = [other for other in names if other.endswith("embed_tokens.weight")]
    return embeddings[0] if name.endswith("lm_head.weight") and len(embeddings) == 1 else None


def _blend_file(
    file: Path, base: _Weights, tuned: _Weights, partner: dict[str, str], alphas: dict[Path, float]
) -> None:
    """One safetensors file of the tuned folder for every alpha: its very header, then each tensor at its old place."""
    header, names = _header(file)
    with contextlib.ExitStack() as stack:
        outputs: list[tuple[float, BinaryIO]] = []
        for folder, alpha in alphas.items():
            outputs.append((alpha, stack.enter_context((folder / file.name).open("wb"))))
            outputs[-1][1].write(header)
        for name in names:
            theta0, theta_ft = base.flat(partner[name]), tuned.flat(name)
            blended = theta0.dtype in _BLENDED and theta_ft.dtype in _BLENDED
            if not blended and not _same(theta0, theta_ft):
                raise UserError(
                    f"{name} differs between --base {base.folder} ({_words(theta0)}) and --tuned {tuned.folder} ({_words(theta_ft)}); "
                    f"of these dtypes nothing can be blended, give folders in {', '.join(map(_words, _BLENDED))}"
                )
            for start in range(0, theta_ft.numel(), CHUNK):
                piece0, piece = theta0[start : start + CHUNK], theta_ft[start : start + CHUNK]
                for alpha, output in outputs:
                    output.write(_bytes(_blend(piece0, piece, alpha) if blended else piece))


def _blend(theta0: torch.Tensor, theta_ft: torch.Tensor, alpha: float) -> torch.Tensor:
    # The end points as they are: 0 * theta would turn -0 into 0, and an infinity into NaN.
    if alpha == 1:
        return theta_ft
    if alpha == 0:
        return theta0.to(theta_ft.dtype)
    wide = torch.float64 if theta_ft.dtype == torch.float64 else torch.float32
    return ((1 - alpha) * theta0.to(wide) + alpha * theta_ft.to(wide)).to(theta_ft.dtype)


def _header(file: Path) -> tuple[bytes, list[str]]:
    """A safetensors file's bytes before its data, and its tensors' names in the order of their data."""
    with file.open("rb") as stream:
        length = stream.read(8)
        text = stream.read(int.from_bytes(length, "little"))
    tensors = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
    return length + text, sorted(tensors, key=lambda name: tensors[name]["data_offsets"])


def _bytes(values: torch.Tensor) -> memoryview:
    return values.contiguous().view(torch.uint8).numpy().data


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return all(
        torch.equal(one[start : start + CHUNK].view(torch.uint8), other[start : start + CHUNK].view(torch.uint8))
        for start in range(0, one.numel(), CHUNK)
    )


def _words(values: torch.Tensor | torch.dtype) -> str:
    return str(values if isinstance(values, torch.dtype) else values.dtype).removeprefix("torch.")


def _copy_the_rest(tuned: Path, target: Path) -> None:
    for path in sorted(tuned.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)
