"""A pretrained model's folder, whatever the format of its weights: read one weight at a time, checked, written as a whole."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torchtune.modules import TransformerDecoder

from finch.dtensor import full_tensor
from finch.errors import UserError, WriteFailed
from finch.files import atomic_folder
from finch.models.lora import adapter_parameters
from finch.weights.conversion import HEAD, StateDict

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


class PretrainedFolder(ABC):
    """What the recipe asks of the folder it starts from: does the model fit, its weights, a folder like it for the tuned ones.

    Attributes:
        folder: the folder that messages name.
        files: the weight files; safetensors, or pickled ones that are read as weights only. No code in them is run.
    """

    folder: Path
    files: list[Path]

    @abstractmethod
    def check_model(self, model: TransformerDecoder, component: str) -> None:
        """Compares the model with what the folder says of it, then with the stored shapes.

        Args:
            model: as built, on any device.
            component: the dotted path of its builder.

        Raises:
            UserError: names the first difference.
        """

    @abstractmethod
    def _to_tune(self, weights: StateDict) -> StateDict:
        """Any part of the stored weights under torchtune's names and in its layout."""

    @abstractmethod
    def _head_is_tied(self) -> bool:
        """Whether a stored output layer is the embedding once more."""

    @abstractmethod
    def _write_into(self, target: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Writes torchtune's weights, whole and on the CPU, into an empty folder."""

    def check_shapes(self, model: nn.Module) -> None:
        """Compares names and shapes of the stored weights with the model's, from file headers alone.

        Args:
            model: the torchtune decoder; may be on the meta device. Its LoRA weights are its own, and not looked for.

        Raises:
            UserError: a weight that is missing, left over, or of another shape.
        """
        own = adapter_parameters(model)
        wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in own}
        found: dict[str, tuple[int, ...]] = {}
        for name, shape in self._headers():
            # Conversions move elements about, and rename; on the meta device they cost nothing.
            try:
                converted = self._to_tune({name: torch.empty(shape, device="meta")})
            except Exception as error:  # torchtune's converter knows each name and each head of the family, or fails
                raise UserError(
                    f"checkpointer.checkpoint_dir={self.folder} holds {name} of shape {list(shape)}, which does not belong to "
                    f"{self._expected()}; download the folder again"
                ) from error
            found.update({key: tuple(tensor.shape) for key, tensor in converted.items()})
        if HEAD in found and HEAD not in wanted and self._head_is_tied():
            del found[HEAD]
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
            for name, tensor in tensors_of(file):
                yield from self._to_tune({name: tensor}).items()

    def write(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        target: Path,
        *,
        is_writer: bool,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Writes a folder of the tuned weights: beside it first, then renamed, so that it is whole or absent.

        Every rank must call it, since sharded weights are gathered one at a time; only the writer keeps them.

        Raises:
            WriteFailed: on the writer, after all have gathered.

        Args:
            weights: torchtune's names and tensors, sharded or not.
            target: the folder; replaced if it is there.
            is_writer: whether this rank writes.
            dtype: of the stored weights; None: as they are.
        """
        whole = (
            (name, gathered.to("cpu", dtype or gathered.dtype) if is_writer else gathered)
            for name, gathered in ((name, full_tensor(tensor.detach())) for name, tensor in weights)
        )
        if not is_writer:
            for _ in whole:
                pass
            return
        try:
            with atomic_folder(target) as partial:
                self._write_into(partial, whole)
        except (OSError, SafetensorError) as error:
            for _ in whole:  # the other ranks still gather
                pass
            raise WriteFailed(str(error)) from error

    def _expected(self) -> str:
        """The model that a stored weight should belong to, for messages."""
        return "a model that torchtune knows"

    def _headers(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for file in self.files:
            if file.suffix != ".safetensors":
                yield from ((name, tuple(tensor.shape)) for name, tensor in tensors_of(file))
                continue
            with _open(file) as content:
                for name in content.keys():  # noqa: SIM118 (not a dict)
                    yield name, tuple(content.get_slice(name).get_shape())


def check_folder(checkpoint_dir: str) -> Path:
    """
    Raises:
        UserError: there is no such folder.
    """
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise UserError(
            f"checkpointer.checkpoint_dir={checkpoint_dir} is not a folder; download the model or correct the path"
        )
    return folder


def check_files(folder: Path, names: list[str]) -> list[Path]:
    """The paths of the named weight files.

    Raises:
        UserError: names the first one that is missing.
    """
    for name in names:
        if not (folder / name).is_file():
            raise UserError(
                f"checkpointer.checkpoint_files names {name}, which is not in {folder}; download it or correct the name"
            )
    return [folder / name for name in names]


def copy_side_files(source: Path, target: Path, without: tuple[str, ...] = ()) -> None:
    """Copies tokenizer files, generation_config and the like: whatever is neither weights nor hidden."""
    for path in sorted(source.iterdir()):
        is_hidden_or_weights = path.name.startswith(".") or path.name.endswith(WEIGHT_SUFFIXES)
        if path.is_file() and not is_hidden_or_weights and path.name not in without:
            shutil.copyfile(path, target / path.name)


def tensors_of(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight file's names and tensors, under the names in the file, on the CPU.

    Raises:
        UserError: a file that is broken, or holds more than weights.
    """
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
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise UserError(f"{file} holds {name}, which is not a weight; give a file of the model's weights alone")
        yield name, tensor


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except Exception as error:
        raise UserError(
            f"{file} is not a whole safetensors file ({' '.join(str(error).split())}); download it again"
        ) from error
