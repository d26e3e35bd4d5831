"""The interface of a pretrained model's folder, whatever the format of its weights: check the model, read, write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torchtune.modules import TransformerDecoder

from finch.dtensor import each_shard, local_block, to_local
from finch.errors import UserError, WriteFailed
from finch.files import atomic_folder
from finch.models.lora import adapter_parameters
from finch.weights.conversion import HEAD, StateDict, rows_of
from finch.weights.files import read_shapes, read_tensors, stored_tensors

Part = tuple[str, tuple[slice, ...], torch.Tensor]
"""A weight's name, a part of it as a slice for each dimension, and the values there."""


class PretrainedFolder(ABC):
    """A folder that training starts from: checks the model against it, reads its weights, writes a folder like it.

    Attributes:
        folder: its path, for messages.
        files: the weight files; safetensors, or pickled ones that are read as weights only. No code in them is run.
    """

    folder: Path
    files: list[Path]

    @abstractmethod
    def check_model(self, model: TransformerDecoder, component: str) -> None:
        """Compares the model with the folder's config, then with the shapes of its weights.

        Args:
            model: as built, on any device.
            component: the dotted path of its builder.

        Raises:
            UserError: names the first difference.
        """

    @abstractmethod
    def _to_torchtune(self, weights: StateDict) -> StateDict:
        """Any part of the stored weights under torchtune's names and in its layout."""

    @abstractmethod
    def _is_head_tied(self) -> bool:
        """Whether a stored output layer is a copy of the embedding."""

    @abstractmethod
    def _write_into(self, target: Path, like: StateDict, parts: Iterator[Part]) -> None:
        """Writes a model into an empty folder.

        Args:
            like: tensors of its shapes and dtypes, by torchtune's names, on the meta device.
            parts: of all of them, on the CPU.
        """

    def _rows_to_torchtune(self, name: str, num_rows: int) -> dict[str, torch.Tensor]:
        """See :meth:`finch.weights.conversion.Conversion.rows_to_torchtune`."""
        return rows_of(self._to_torchtune, name, num_rows)

    def check_shapes(self, model: nn.Module) -> None:
        """Compares names and shapes of the stored weights with the model's, from file headers alone.

        Args:
            model: the torchtune decoder; may be on the meta device. Its LoRA weights are not expected in the folder.

        Raises:
            UserError: a weight that is missing, unexpected, or of another shape.
        """
        adapters = adapter_parameters(model)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in adapters}
        stored: dict[str, tuple[int, ...]] = {}
        for name, shape in (item for file in self.files for item in read_shapes(file)):
            # Conversions rename tensors and permute elements; on the meta device they cost nothing.
            try:
                converted = self._to_torchtune({name: torch.empty(shape, device="meta")})
            except Exception as error:  # torchtune's converter knows each name and each head of the family, or fails
                raise UserError(
                    f"checkpointer.checkpoint_dir={self.folder} holds {name} of shape {list(shape)}, which does not belong to "
                    f"{self._model_name()}; download the folder again"
                ) from error
            stored.update({key: tuple(tensor.shape) for key, tensor in converted.items()})
        if HEAD in stored and HEAD not in expected and self._is_head_tied():
            del stored[HEAD]
        for name in sorted(expected.keys() | stored.keys()):
            if expected.get(name) != stored.get(name):
                there = f"has shape {list(stored[name])}" if name in stored else "is missing"
                here = f"expects {list(expected[name])}" if name in expected else "has no such weight"
                raise UserError(
                    f"model does not fit checkpointer.checkpoint_dir={self.folder}: there {name} {there}, the model {here}; give the builder of this checkpoint"
                )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The stored weights under torchtune's names, one at a time, on the CPU."""
        for file in self.files:
            for name, tensor in read_tensors(file):
                yield from self._to_torchtune({name: tensor}).items()

    def load_into(self, parameters: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Copies the stored weights into parameters, in place and without communication.

        Each rank reads the rows and columns of its own shards. Where a conversion permutes rows within a head it reads the
        range that its rows lie in, at most to the ends of the heads.

        Args:
            parameters: of one or more decoders, by torchtune's names; sharded or not, of any dtype and device.
        """
        for stored in (stored for file in self.files for stored in stored_tensors(file)):
            for name, rows in self._rows_to_torchtune(stored.name, stored.shape[0]).items():
                for parameter in (each[name] for each in parameters if name in each):
                    local_rows, *columns = local_block(parameter)
                    with torch.no_grad():
                        to_local(parameter).copy_(stored.read_rows(rows[local_rows], tuple(columns)))

    def write(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        target: Path,
        *,
        is_writer: bool,
        dtype: torch.dtype | None = None,
        like: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Writes a folder of the tuned weights; it is complete or absent.

        Every rank must call it: the others send their shards to the writer, one at a time, which puts each into its place in
        the file. No rank holds a complete tensor, unless ``weights`` has it.

        Args:
            weights: torchtune's names and tensors, sharded or not.
            target: the folder; replaced if it is there.
            is_writer: whether this rank writes.
            dtype: of the stored weights; None: as they are.
            like: tensors of the names, shapes and dtypes that ``weights`` will yield; None: all of ``weights`` are taken at once.

        Raises:
            WriteFailed: on the writer, after all ranks have sent.
        """
        if like is None:
            weights = list(weights)
            like = dict(weights)
        parts = (
            (name, block, shard.to("cpu", dtype or shard.dtype) if is_writer else shard)
            for name, tensor in weights
            for block, shard in each_shard(tensor.detach())
        )
        if not is_writer:
            for _ in parts:
                pass
            return
        like = {
            name: torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta") for name, tensor in like.items()
        }
        try:
            with atomic_folder(target) as partial:
                self._write_into(partial, like, parts)
        except OSError as error:
            for _ in parts:  # the other ranks still send
                pass
            raise WriteFailed(str(error)) from error

    def _model_name(self) -> str:
        """The model that a stored weight should belong to, for messages."""
        return "a model that torchtune knows"
