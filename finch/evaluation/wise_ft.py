"""WiSE-FT: a model between the pretrained and the tuned one, theta = (1 - alpha) * theta_0 + alpha * theta_ft.

"Robust fine-tuning of zero-shot models" (Wortsman et al., arXiv 2109.01903). Computed after training, from two Hugging Face
folders, for all parameters, in fp32, and cast once to the dtype of the tuned folder. Needs no torchtune.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from finch.base.errors import UserError, writing
from finch.base.run_files import CELL, CONFIG, HF_CONFIG, chosen_model
from finch.models.hf_config import check_folder, read_config, rope_settings
from finch.weights import files

_BLENDED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Settings of config.json that change a model and not the shapes of its weights.
_EQUAL = (
    *("model_type", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "hidden_act"),
    *("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
)
_REMEDY = "give the model that was tuned as the base"


def wise_ft(base: str | Path, tuned: str | Path, alphas: Sequence[float], out: str | Path) -> list[Path]:
    """Writes a Hugging Face folder OUT/alpha_A for each alpha.

    A folder has the tuned one's files: config, tokenizer, index, and weights under the same names, in the same shards
    and dtypes. alpha 0 is the base (cast to these dtypes), alpha 1 the tuned model, bit for bit. Memory holds one shard.
    Each folder is complete or absent; all models are checked before anything is written.

    A head tied to the embedding may be stored in one of the two folders only. Where the base does not store it, its
    embedding is used; where the tuned folder does not, the base's must be a copy of its embedding.

    Args:
        base, tuned: the folders of the pretrained and the tuned model, with safetensors; the latter may be a run's, or a sweep's: then each
            cell's folders are in OUT/CELL, written one cell after the other.
        alphas: weights of the tuned model, each in [0, 1]; 0.5 in the paper.
        out: parent of the folders; created if it does not exist.

    Returns the folders written, in the order of ``alphas``.

    Raises UserError if an alpha is out of range or repeated, its folder exists, a file is missing or broken, the models differ in names,
    shapes or settings, or OUT cannot be written.
    """
    base, tuned, out = Path(base), Path(tuned), Path(out)
    [tuned, *more] = models_in(tuned)
    if more:
        return [path for each in (tuned, *more) for path in wise_ft(base, each, alphas, out / each.name)]
    if not (tuned / HF_CONFIG).is_file():
        tuned = chosen_model(tuned) or tuned
    targets = _targets(alphas, out)
    theta_0, theta_ft = _Weights("--base", base), _Weights("--tuned", tuned)
    check_settings(base, tuned, _EQUAL)
    base_name_of = _match(theta_0, theta_ft)
    with writing(str(out), "make room or give another place"), contextlib.ExitStack() as stack:
        folders = [stack.enter_context(files.new_model_folder(target)) for target in targets]
        for folder, alpha in zip(folders, alphas, strict=True):

            def average(name: str, weight: torch.Tensor, alpha: float = alpha) -> torch.Tensor:
                return blend(theta_0.tensor(base_name_of[name]), weight, alpha)

            rewrite(tuned, folder, average)
    return targets


def models_in(folder: Path) -> list[Path]:
    """The folders of models that a path names: of RUN/average its model, of a sweep its trained cells, of averages of two folders their models; else
    the path itself."""
    if (folder / "model" / HF_CONFIG).is_file() and not (folder / HF_CONFIG).is_file():
        return [folder / "model"]
    if any((folder / name).is_file() for name in (CONFIG, HF_CONFIG, CELL)):
        return [folder]
    cells = [cell.parent for cell in sorted(folder.glob(f"*/{CELL}")) if chosen_model(cell.parent) is not None]
    # Of one model; of the models of a sweep, a folder for each.
    averages = [*folder.glob(f"alpha_*/{HF_CONFIG}"), *folder.glob(f"*/alpha_*/{HF_CONFIG}")]
    return cells or sorted(path.parent for path in averages) or [folder]


def rewrite(source: Path, target: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    """Fills the folder ``target`` with ``source``'s files, each weight by ``change(name, weight)``, under the same names and in the same shards.
    Memory holds one shard. Raises UserError if a file of ``source`` is broken, OSError if ``target`` cannot be written."""
    files.copy_side_files(source, target)
    # Side files leave the index out, since shards are mostly cut anew; here they stay as they are.
    if (source / files.SAFETENSORS_INDEX).is_file():
        shutil.copyfile(source / files.SAFETENSORS_INDEX, target / files.SAFETENSORS_INDEX)
    for name in files.indexed_shards(source) or [files.SAFETENSORS]:
        shard = files.open_safetensors(source / name)
        content = {key: change(key, shard.get_tensor(key)) for key in shard.keys()}  # noqa: SIM118 (not a dict)
        try:
            save_file(content, target / name, shard.metadata())
        except SafetensorError as error:
            raise OSError(str(error)) from error


class _Weights:
    """A folder's safetensors, mapped into memory. ``option``: of the command, by which the folder was given, for messages."""

    def __init__(self, option: str, folder: Path) -> None:
        self.label = f"{option}={check_folder(folder, option)}"
        file_names = files.indexed_shards(folder) or [files.SAFETENSORS]
        if not (folder / file_names[0]).is_file():
            remedy = "give a Hugging Face folder with safetensors"
            if (folder / files.ADAPTER_CONFIG).is_file():
                remedy = "merge the adapter into its model first"
            raise UserError(f"{self.label} has neither {files.SAFETENSORS} nor {files.SAFETENSORS_INDEX}; {remedy}")
        self.shards = {name: files.open_safetensors(folder / name) for name in file_names}
        self._shard_of = {name: shard for shard in self.shards.values() for name in shard.keys()}  # noqa: SIM118
        self.names = self._shard_of.keys()

    def tensor(self, name: str) -> torch.Tensor:
        return self._shard_of[name].get_tensor(name)

    def shape(self, name: str) -> list[int]:
        return self._shard_of[name].get_slice(name).get_shape()

    def dtype(self, name: str) -> str:
        return self._shard_of[name].get_slice(name).get_dtype()


def _targets(alphas: Sequence[float], out: Path) -> list[Path]:
    targets: list[Path] = []
    if not alphas:
        raise UserError("--alpha is empty; give at least one number in [0, 1], such as 0.5")
    if out.exists() and not out.is_dir():
        raise UserError(f"--out={out} is a file; give a folder")
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise UserError(f"--alpha={alpha:g} must be in [0, 1]: it is the tuned model's weight, 0.5 in the paper")
        target = out / f"alpha_{alpha:g}"
        if target in targets:
            raise UserError(f"--alpha={alpha:g} is given twice; give each number once")
        if target.exists():
            raise UserError(f"{target} exists; remove it or give another --out")
        targets.append(target)
    return targets


def check_settings(base: Path, tuned: Path, keys: Sequence[str]) -> None:
    """Raises UserError for one of ``keys`` of config.json in which the folders differ; one that a folder leaves open may be anything."""
    configs = [read_config(folder, option) for folder, option in ((base, "--base"), (tuned, "--tuned"))]
    models = ({**config, **(config.get("text_config") or {})} for config in configs)
    before, after = ({**model, **rope_settings(model)} for model in models)
    for key in keys:
        one, other = before.get(key), after.get(key)
        if one is not None and other is not None and one != other:
            raise UserError(f"--base={base} has {key}={one}, --tuned={tuned} has {key}={other}; {_REMEDY}")


def _match(base: _Weights, tuned: _Weights) -> dict[str, str]:
    """For each name in the tuned folder the name of the base's tensor it is blended with."""
    base_name_of = {name: name for name in tuned.names}
    for name in sorted(tuned.names ^ base.names):
        holder, other = (base, tuned) if name in base.names else (tuned, base)
        embedding = _embedding_tied_to(name, holder)
        if embedding is None or embedding not in other.names:
            raise UserError(f"{other.label} has no {name}, which {holder.label} has; {_REMEDY}")
        if holder is tuned:
            base_name_of[name] = embedding
        elif not _equal_bits(base.tensor(name), base.tensor(embedding)):
            raise UserError(
                f"{base.label} has its own output layer {name}, {tuned.label} ties it to {embedding}; {_REMEDY}"
            )
    for name, base_name in base_name_of.items():
        if base.shape(base_name) != tuned.shape(name):
            raise UserError(
                f"{name} has shape {base.shape(base_name)} in {base.label} and {tuned.shape(name)} in {tuned.label}; {_REMEDY}"
            )
        dtypes = base.dtype(base_name), tuned.dtype(name)
        if not set(dtypes) <= _BLENDED_DTYPES.keys() and not _equal_bits(base.tensor(base_name), tuned.tensor(name)):
            raise UserError(
                f"{name} differs between {base.label} ({dtypes[0]}) and {tuned.label} ({dtypes[1]}), and only {', '.join(_BLENDED_DTYPES)} can be blended; give folders in these dtypes"
            )
    return base_name_of


def _embedding_tied_to(name: str, weights: _Weights) -> str | None:
    """The embedding that an output layer can be a copy of."""
    embeddings = [other for other in weights.names if other.endswith("embed_tokens.weight")]
    return embeddings[0] if name.endswith("lm_head.weight") and len(embeddings) == 1 else None


def blend(theta_0: torch.Tensor, theta_ft: torch.Tensor, alpha: float) -> torch.Tensor:
    """(1 - alpha) * theta_0 + alpha * theta_ft in fp32 or wider, in the dtype of theta_ft."""
    # Not by the formula at the end points: 0 * theta would turn -0 into 0 and infinity into NaN. In other dtypes both are equal.
    if alpha == 1 or theta_ft.dtype not in _BLENDED_DTYPES.values():
        return theta_ft
    if alpha == 0:
        return theta_0.to(theta_ft.dtype)
    wide = torch.promote_types(theta_ft.dtype, torch.float32)
    return ((1 - alpha) * theta_0.to(wide) + alpha * theta_ft.to(wide)).to(theta_ft.dtype)


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
