"""Hugging Face folders in and out: safetensors, config.json, tokenizer files.

Takes torchtune's `checkpointer:` block for every model that finch can convert. Weights are read from safetensors, or
by torch.load with weights_only; no code in a folder is ever run.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torchtune.modules import TransformerDecoder

from finch.errors import UserError
from finch.models.agreement import check_agreement
from finch.models.conversion import conversion_for
from finch.parallel import full

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
SAFETENSORS_INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
# The other places where a config keeps the dtype that transformers loads the weights in.
_DTYPE_KEYS = ("dtype", "torch_dtype")


class HuggingFaceFolder:
    """A pretrained model's folder, and the form in which the tuned one is written.

    Args:
        checkpoint_dir: folder with config.json, tokenizer files and weights.
        checkpoint_files: names of the weight files, or torchtune's ``{filename_format, max_filename}``; None: the
            folder's index, or its model.safetensors; an empty list: a folder without weights, to be written from.

    The other keys of torchtune's block are taken so that it works unchanged: output_dir (the recipe's own decides),
    model_type (config.json knows), recipe_checkpoint, adapter_checkpoint, safe_serialization,
    should_load_recipe_state, resume_from_checkpoint.

    Raises:
        UserError: a missing folder, config.json, weight file or shard.
    """

    def __init__(
        self,
        checkpoint_dir: str,
        checkpoint_files: list[str] | Mapping[str, str] | None = None,
        model_type: str | None = None,
        output_dir: str | None = None,
        recipe_checkpoint: str | None = None,
        adapter_checkpoint: str | None = None,
        safe_serialization: bool = True,
        should_load_recipe_state: bool = False,
        resume_from_checkpoint: bool = False,
    ) -> None:
        self.folder = Path(checkpoint_dir)
        if not self.folder.is_dir():
            raise UserError(
                f"checkpointer.checkpoint_dir={checkpoint_dir} is not a folder; download the model or correct the path"
            )
        config_file = self.folder / "config.json"
        if not config_file.is_file():
            raise UserError(
                f"checkpointer.checkpoint_dir={checkpoint_dir} has no config.json; give a folder in Hugging Face's format"
            )
        try:
            self.config: dict[str, Any] = json.loads(config_file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{config_file} is not JSON ({error}); download it again") from error
        self._conversion = conversion_for(self.config, checkpoint_dir)
        self.files = [self.folder / name for name in self._file_names(checkpoint_files)]
        for file in self.files:
            if not file.is_file():
                raise UserError(
                    f"checkpointer.checkpoint_files names {file.name}, which is not in {checkpoint_dir}; download it or correct the name"
                )

    def check_model(self, model: TransformerDecoder, component: str) -> None:
        """Compares the model with config.json, then with the stored shapes.

        Raises:
            UserError: see :func:`finch.models.agreement.check_agreement` and ``check_shapes``.
        """
        check_agreement(model, component, self.config, str(self.folder))
        self.check_shapes(model)

    def check_shapes(self, model: nn.Module) -> None:
        """Compares names and shapes of the stored weights with the model's, from file headers alone.

        Args:
            model: the torchtune decoder; may be on the meta device.

        Raises:
            UserError: a weight that is missing, left over, or of another shape.
        """
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self._headers():
            # Conversions move elements about, and rename; on the meta device they cost nothing.
            try:
                converted = self._conversion.to_tune({name: torch.empty(shape, device="meta")}, self.config)
            except Exception as error:  # torchtune's converter knows each name and each head of the family, or fails
                raise UserError(
                    f"checkpointer.checkpoint_dir={self.folder} holds {name} of shape {list(shape)}, which does not belong to the "
                    f"{self.config['model_type']} model of its config.json; download the folder again"
                ) from error
            found.update({key: tuple(tensor.shape) for key, tensor in converted.items()})
        if self.config.get("tie_word_embeddings") and "output.weight" not in wanted:
            found.pop("output.weight", None)  # a tied head that some folders store all the same
        for name in sorted(wanted.keys() | found.keys()):
            if wanted.get(name) != found.get(name):
                stored = f"has shape {list(found[name])}" if name in found else "is missing"
                asked = f"wants {list(wanted[name])}" if name in wanted else "has no such weight"
                raise UserError(
                    f"model does not fit checkpointer.checkpoint_dir={self.folder}: there {name} {stored}, the model {asked}; give the builder of this checkpoint"
                )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The stored weights under torchtune's names, one at a time, on the CPU."""
        for file in self.files:
            for name, tensor in _tensors(file):
                yield from self._conversion.to_tune({name: tensor}, self.config).items()

    def write(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        target: Path,
        *,
        is_writer: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes a folder that transformers loads: beside it first, then renamed, so that it is whole or absent.

        Every rank must call it, since sharded weights are gathered one at a time; only the writer keeps them, up to
        one file's worth.

        Args:
            weights: torchtune's names and tensors, sharded or not.
            target: the folder; replaced if it is there.
            is_writer: whether this rank writes.
            dtype: of the stored weights; None: as they are.
        """
        partial = target.with_name(target.name + ".partial")
        if is_writer:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        parts: list[dict[str, torch.Tensor]] = [{}]
        index: dict[str, int] = {}
        part_bytes = total = 0
        stored_dtype = dtype
        for name, tensor in weights:
            tensor = full(tensor.detach())
            if not is_writer:
                continue
            for stored, value in self._conversion.to_hugging_face(
                {name: tensor.to("cpu", dtype or tensor.dtype)}, self.config
            ).items():
                size = value.numel() * value.element_size()
                if parts[-1] and part_bytes + size > MAX_SHARD_BYTES:
                    save_file(parts[-1], partial / f"part-{len(parts)}", metadata={"format": "pt"})
                    parts[-1] = {}
                    parts.append({})
                    part_bytes = 0
                parts[-1][stored] = value.contiguous()
                index[stored] = len(parts)
                part_bytes, total = part_bytes + size, total + size
                stored_dtype = value.dtype
        if not is_writer:
            return
        save_file(parts[-1], partial / f"part-{len(parts)}", metadata={"format": "pt"})
        names = {
            part: "model.safetensors" if len(parts) == 1 else f"model-{part:05}-of-{len(parts):05}.safetensors"
            for part in index.values()
        }
        for part, file_name in names.items():
            (partial / f"part-{part}").rename(partial / file_name)
        if len(parts) > 1:
            content = {
                "metadata": {"total_size": total},
                "weight_map": {name: names[part] for name, part in index.items()},
            }
            (partial / SAFETENSORS_INDEX).write_text(
                json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
        self._copy_the_rest(partial, stored_dtype)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)

    def _copy_the_rest(self, target: Path, dtype: torch.dtype | None) -> None:
        """Tokenizer files, generation_config and the like; config.json with the dtype the weights now have."""
        for path in sorted(self.folder.iterdir()):
            if (
                path.is_file()
                and not path.name.startswith(".")
                and not path.name.endswith(WEIGHT_SUFFIXES)
                and path.name != "config.json"
            ):
                shutil.copyfile(path, target / path.name)
        config = dict(self.config)
        keys = [key for key in _DTYPE_KEYS if key in config] or ["torch_dtype"]
        config.update({key: str(dtype).removeprefix("torch.") for key in keys})
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def _file_names(self, files: list[str] | Mapping[str, str] | None) -> list[str]:
        index = self.folder / SAFETENSORS_INDEX
        if files is None:
            if index.is_file():
                return self._indexed(index)
            return ["model.safetensors"]
        if isinstance(files, Mapping):
            if set(files) != {"filename_format", "max_filename"}:
                raise UserError(
                    f"checkpointer.checkpoint_files={dict(files)} must be a list of names, or have filename_format and max_filename"
                )
            last = str(files["max_filename"])
            return [
                files["filename_format"].format(str(number + 1).zfill(len(last)), last) for number in range(int(last))
            ]
        names = sorted(str(name) for name in files)
        if index.is_file() and any(name.endswith(".safetensors") for name in names):
            left_out = sorted(set(self._indexed(index)) - set(names))
            if left_out:
                raise UserError(
                    f"checkpointer.checkpoint_files leaves out {left_out[0]}, which {index} needs; name every shard"
                )
        return names

    def _indexed(self, index: Path) -> list[str]:
        shards = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for shard in shards:
            if not (self.folder / shard).is_file():
                raise UserError(f"{index} lists {shard}, which is not in {self.folder}; download the missing shard")
        return shards

    def _headers(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for file in self.files:
            if file.suffix != ".safetensors":
                yield from ((name, tuple(tensor.shape)) for name, tensor in _tensors(file))
                continue
            with _open(file) as content:
                for name in content.keys():  # noqa: SIM118 (not a dict)
                    yield name, tuple(content.get_slice(name).get_shape())


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if file.suffix == ".safetensors":
        with _open(file) as content:
            for name in content.keys():  # noqa: SIM118 (not a dict)
                yield name, content.get_tensor(name)
        return
    try:
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:
        raise UserError(
            f"{file} cannot be read as weights only ({type(error).__name__}); convert it to safetensors"
        ) from error
    yield from state.items()


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:
        raise UserError(
            f"{file} is not a whole safetensors file ({' '.join(str(error).split())}); download it again"
        ) from error
