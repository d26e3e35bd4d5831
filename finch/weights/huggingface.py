"""A pretrained model's folder: the interface that all formats share, Hugging Face folders in and out, and the check of a model against
config.json, in the settings that tensor shapes do not show.

Weights are read from safetensors, or by torch.load with weights_only; no code in a folder is ever run.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchtune.models.gemma2._attention import Gemma2Attention
from torchtune.models.gemma2._component_builders import Gemma2FinalNorm
from torchtune.modules import TiedLinear, TransformerDecoder

from finch.base.dtensor import each_shard, local_block, to_local
from finch.base.errors import UserError, WriteFailed
from finch.base.files import write_text
from finch.models.chat_template import CHAT_TEMPLATE, read_chat_template
from finch.models.hf_config import CONFIG, FAMILIES, attention_window, check_folder, is_tied, read_config, rope_settings
from finch.models.lora import adapter_parameters
from finch.weights.conversion import EMBEDDING, HEAD, StateDict, StoredWeight, conversion_for, rows_of
from finch.weights.files import (
    SAFETENSORS,
    SAFETENSORS_INDEX,
    SafetensorsWriter,
    check_export,
    check_files,
    copy_side_files,
    indexed_shards,
    new_model_folder,
    read_json,
    read_tensors,
    stored_tensors,
    write_json,
)

MAX_SHARD_BYTES = 5 * 10**9
_DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json; newer and older transformers
# Families whose builders in torchtune 0.6.1 differ from the published models; finch has builders of the same names.
_REBUILT = ("gemma2", "phi4")
# Llama 3.1's rope scaling: the keys of config.json, and the attributes of torchtune's module.
_ROPE_SCALING = {
    "factor": "scale_factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "old_context_len",
}

GENERATION_CONFIG = "generation_config.json"

Part = tuple[str, tuple[slice, ...], torch.Tensor]
"""A weight's name, a part of it as a slice for each dimension, and the values there."""


class PretrainedFolder(ABC):
    """A folder that training starts from: checks the model against it, reads its weights from ``files``, writes a folder like it.

    Attributes:
        window: see :func:`finch.models.hf_config.attention_window`.
        chat_template: of the rows that are trained on, which written folders get; None: that of ``folder``, if any.
        stop_tokens: ids that end an answer in these rows, at which whoever serves a written folder has to stop.
    """

    folder: Path
    files: list[Path]
    window: int | None = None
    chat_template: str | None = None
    stop_tokens: Sequence[int] = ()

    @abstractmethod
    def check_model(self, model: TransformerDecoder, component: str) -> None:
        """Compares the model with the folder's config, then with the shapes of its weights. Raises UserError that names the first difference.

        ``component``: the dotted path of the model's builder.
        """

    @abstractmethod
    def _to_torchtune(self, weights: StateDict) -> StateDict:
        """Any part of the stored weights under torchtune's names and in its layout."""

    @abstractmethod
    def _write_into(self, target: Path, like: StateDict, parts: Iterator[Part]) -> None:
        """Writes a model into an empty folder. ``like``: tensors of its shapes and dtypes, on the meta device."""

    def _rows_to_torchtune(self, name: str, num_rows: int) -> dict[str, torch.Tensor]:
        """Which rows of a stored weight each of torchtune's has; see :meth:`finch.weights.conversion.Conversion.rows_to_torchtune`."""
        return rows_of(self._to_torchtune, name, num_rows)

    def check_shapes(self, model: nn.Module) -> None:
        """Compares names and shapes of the stored weights with the model's, LoRA left out; only file headers are read. Raises UserError for
        a weight that is missing, unexpected, or of another shape."""
        adapters = adapter_parameters(model)
        expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in adapters}
        stored: dict[str, tuple[int, ...]] = {}
        for name, shape in ((each.name, each.shape) for file in self.files for each in stored_tensors(file)):
            # Conversions rename tensors and permute elements; on the meta device they cost nothing.
            try:
                converted = self._to_torchtune({name: torch.empty(shape, device="meta")})
            except Exception as error:  # torchtune's converter knows each name and each head of the family, or fails
                raise UserError(
                    f"checkpointer.checkpoint_dir={self.folder} holds {name} of shape {list(shape)}, which does not belong to "
                    f"{self._model_name()}; download the folder again"
                ) from error
            is_whole = len(converted) == 1  # its heads are permuted by views, which give another shape the right one
            stored.update({key: shape if is_whole else tuple(tensor.shape) for key, tensor in converted.items()})
        if HEAD in stored and HEAD not in expected:
            if not self._is_head_tied():
                raise UserError(
                    f"checkpointer.checkpoint_dir={self.folder} stores a head that differs from the embedding, which the model takes for both; give "
                    f"the builder of an untied model, with tie_word_embeddings=false where there is a {CONFIG}, or remove the head"
                )
            del stored[HEAD]
        for name in sorted(expected.keys() | stored.keys()):
            if expected.get(name) != stored.get(name):
                there = f"has shape {list(stored[name])}" if name in stored else "is missing"
                here = f"expects {list(expected[name])}" if name in expected else "has no such weight"
                raise UserError(
                    f"model does not fit checkpointer.checkpoint_dir={self.folder}: there {name} {there}, the model {here}; give the builder of this checkpoint"
                )

    def _is_head_tied(self) -> bool:
        """Whether the stored head is the embedding a second time, as some folders of tied models have it, and Meta's."""
        tied = [
            each.read(tuple(map(slice, each.shape)))
            for each in (each for file in self.files for each in stored_tensors(file))
            if self._rows_to_torchtune(each.name, each.shape[0]).keys() & {HEAD, EMBEDDING}
        ]
        return len(tied) == 2 and torch.equal(*tied)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The stored weights under torchtune's names, one at a time, on the CPU."""
        for file in self.files:
            for name, tensor in read_tensors(file):
                yield from self._to_torchtune({name: tensor}).items()

    def load_into(self, parameters: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Copies the stored weights into parameters, in place and without communication.

        Each rank reads the rows and columns of its shards. Where a conversion permutes rows within a head it reads the
        range that its rows lie in, at most to the ends of the heads. ``parameters``: of one or more decoders, by torchtune's names, sharded or
        not, of any dtype and device.
        """
        for stored in (stored for file in self.files for stored in stored_tensors(file)):
            for name, rows in self._rows_to_torchtune(stored.name, stored.shape[0]).items():
                # One reading fills all decoders, the trained one and the pretrained one that it is compared with.
                for parameter in (each[name] for each in parameters if name in each):
                    local_rows, *columns = local_block(parameter)
                    with torch.no_grad():
                        to_local(parameter).copy_(stored.read_rows(rows[local_rows], tuple(columns)))

    def write_chat_settings(self, target: Path) -> None:
        """Makes a written folder answer as it was trained: its chat template, where transformers looks first, and the tokens that end an answer.

        A model's own end may be another token than the one that closes a turn of the template, as in base models of Qwen.
        """
        # A template that the folder has already, in whichever file, is not written a second time.
        if self.chat_template is not None and self.chat_template != read_chat_template(target):
            write_text(target / CHAT_TEMPLATE, self.chat_template)
        for name in (GENERATION_CONFIG, CONFIG):
            file = target / name
            if not file.is_file() and name == GENERATION_CONFIG:
                file = self.folder / name  # an adapter's folder has none
            settings = read_json(file) if file.is_file() else {}
            known = settings.get("eos_token_id")
            ends = known if isinstance(known, list) else [] if known is None else [known]
            if settings and (added := [token for token in self.stop_tokens if token not in ends]):
                write_json(target / name, {**settings, "eos_token_id": [*ends, *added]})

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

        Not by torch's HuggingFaceStorageWriter: it takes all tensors at once, converted, which is a second copy of each rank's shards
        (measured: 7 times as much on top of the model), and writes every tensor to the disk twice.

        Args:
            weights: torchtune's names and tensors, sharded or not.
            target: the folder; replaced if it is there.
            is_writer: whether this rank writes.
            dtype: of the stored weights; None: as they are.
            like: tensors of the names, shapes and dtypes that ``weights`` will yield; None: all of ``weights`` are taken at once.

        Raises WriteFailed on the writer, after all ranks have sent.
        """
        if like is None:
            weights = list(weights)
            like = dict(weights)
        # A generator, since each step moves one shard: memory never holds a second one.
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
            with new_model_folder(target) as partial:
                self._write_into(partial, like, parts)
                self.write_chat_settings(partial)
        except OSError as error:
            for _ in parts:  # the other ranks still send
                pass
            raise WriteFailed(str(error)) from error

    def _model_name(self) -> str:
        """The model that a stored weight should belong to, for messages."""
        return "a model that torchtune knows"


class HuggingFaceFolder(PretrainedFolder):
    """A pretrained model's folder in Hugging Face's format; tuned models are written in the same format.

    ``checkpoint_files``: names of the weight files, or torchtune's ``{filename_format, max_filename}``; None: the files of the folder's
    index, or its model.safetensors; an empty list: read no weights from this folder. The other keys of torchtune's block are accepted and
    ignored, so that it works unchanged: the recipe's output_dir is used, and config.json has the model's type.

    Raises UserError if the folder, config.json, a weight file or a shard is missing.
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
        self.folder = check_folder(checkpoint_dir)
        check_export(self.folder)
        self.config: dict[str, Any] = read_config(self.folder)
        self.window = attention_window(self.config)
        self._conversion = conversion_for(self.config, checkpoint_dir)
        self.files = check_files(self.folder, self._file_names(checkpoint_files))

    def check_model(self, model: TransformerDecoder, component: str) -> None:
        """Compares the model with config.json, then with the stored shapes."""
        validate_against_hf_config(model, component, self.config, str(self.folder))
        self.check_shapes(model)

    def _to_torchtune(self, weights: StateDict) -> StateDict:
        return self._conversion.to_torchtune(weights, self.config)

    def _rows_to_torchtune(self, name: str, num_rows: int) -> dict[str, torch.Tensor]:
        return self._conversion.rows_to_torchtune(name, num_rows, self.config)

    def _model_name(self) -> str:
        return f"the {self.config['model_type']} model of its config.json"

    def _write_into(self, target: Path, like: StateDict, parts: Iterator[Part]) -> None:
        """A folder that transformers loads; the files grow as the parts come."""
        stored_weights = list(self._conversion.stored_weights(like.items(), self.config))
        shards = _shards(stored_weights)
        if len(shards) == 1:
            names = [SAFETENSORS]
        else:
            names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
            weight_map = {weight.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
            metadata = {"total_size": sum(weight.tensor.nbytes for weight in stored_weights)}
            index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
            write_json(target / SAFETENSORS_INDEX, index)
        with contextlib.ExitStack() as stack:
            file_of = {}
            for name, shard in zip(names, shards, strict=True):
                file = SafetensorsWriter(target / name, {weight.name: weight.tensor for weight in shard})
                stack.enter_context(file)
                file_of.update({member: (file, weight) for weight in shard for member in weight.rows})
            for name, (rows, *columns), values in parts:
                file, weight = file_of[name]
                file.write_rows(weight.name, weight.rows[name][rows], tuple(columns), values)
        dtype = stored_weights[-1].tensor.dtype
        copy_side_files(self.folder, target, without=(CONFIG,))
        # Under the name that the file has: a second one could contradict it.
        dtype_keys = [key for key in _DTYPE_KEYS if key in self.config] or ["torch_dtype"]
        write_json(target / CONFIG, self.config | dict.fromkeys(dtype_keys, str(dtype).removeprefix("torch.")))

    def _file_names(self, files: list[str] | Mapping[str, str] | None) -> list[str]:
        if files is None:
            return indexed_shards(self.folder) or [SAFETENSORS]
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
        if any(name.endswith(".safetensors") for name in names):
            # Without this check the model's shapes would be blamed, not the name that was left out.
            missing = sorted(set(indexed_shards(self.folder) or ()) - set(names))
            if missing:
                raise UserError(
                    f"checkpointer.checkpoint_files leaves out {missing[0]}, which {self.folder / SAFETENSORS_INDEX} lists; name every shard"
                )
        return names


def _shards(weights: list[StoredWeight]) -> list[list[StoredWeight]]:
    """The weights of each file, in the given order."""
    shards: list[list[StoredWeight]] = [[]]
    num_bytes = 0
    for weight in weights:
        if shards[-1] and num_bytes + weight.tensor.nbytes > MAX_SHARD_BYTES:
            shards.append([])
            num_bytes = 0
        shards[-1].append(weight)
        num_bytes += weight.tensor.nbytes
    return shards


def validate_against_hf_config(
    decoder: TransformerDecoder, component: str, config: dict[str, Any], folder: str, file: str = "config.json"
) -> None:
    """Compares family, heads, norms and rotary embedding: weights of the right shapes could otherwise be silently misused.

    Args:
        component: the dotted path of the decoder's builder.
        config: the content of ``file`` in ``folder``; keys that are missing are not compared.

    Raises UserError that names the first setting that differs, or if the builder is of another family.
    """
    parts = component.split(".")
    family = parts[2] if parts[:2] in (["torchtune", "models"], ["finch", "models"]) and len(parts) > 3 else None
    known = FAMILIES.get(str(config.get("model_type")))
    if family is not None and known is not None and family not in known.packages:
        raise UserError(
            f"model._component_={component} builds a {family} model, but checkpointer.checkpoint_dir={folder} holds a {config['model_type']} "
            f"model ({', '.join(config.get('architectures') or [])}); give a builder of {' or '.join(known.packages)}"
        )
    rope_type = rope_settings(config)["rope_type"]
    if rope_type not in ("default", "llama3"):
        raise UserError(
            f"{file} of checkpointer.checkpoint_dir={folder} has rope scaling {rope_type!r}, which torchtune's models lack; "
            "give a checkpoint without it, or remove it for sequences within the original context"
        )
    remedy = "give the builder and the settings of this checkpoint"
    if parts[0] == "torchtune" and family in _REBUILT:
        remedy = f"give finch.models.{family}.{parts[-1]}, which is correct"
        if "lora" in parts[-1]:
            remedy = f"finch has no LoRA builder for it, fine-tune it in full with finch.models.{family}"
    if isinstance(decoder.norm, Gemma2FinalNorm):
        raise UserError(
            f"model._component_={component} caps hidden states where the Gemma 2 of checkpointer.checkpoint_dir={folder} caps logits; {remedy}"
        )
    for name, built, stored in _settings(decoder, config):
        if stored is not None and not _is_same(built, stored):
            raise UserError(
                f"model._component_={component} has {name} {_format(built)}, {file} of checkpointer.checkpoint_dir={folder} says {_format(stored)}; {remedy}"
            )


def _settings(decoder: TransformerDecoder, config: dict[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """(setting, the model's value, config.json's value or None where it has none)."""
    attention = decoder.layers[0].attn
    heads = config.get("num_attention_heads")
    yield "number of attention heads", attention.num_heads, heads
    yield "number of key-value heads", attention.num_kv_heads, config.get("num_key_value_heads", heads)
    yield "head dimension", attention.head_dim, config.get("head_dim")
    yield "norm epsilon", decoder.norm.eps, config.get("rms_norm_eps")
    if "model_type" in config:
        tied = isinstance(decoder.output, TiedLinear)
        yield "tied embeddings (1: the output layer is the embedding)", float(tied), float(is_tied(config))
    rope = attention.pos_embeddings
    settings = rope_settings(config)
    yield "rope base", rope.base, settings.get("rope_theta")
    yield "rotated fraction of each head", 1.0, settings["partial_rotary_factor"]
    is_scaled = settings["rope_type"] == "llama3" and settings.get("factor") != 1
    # Scaled by 1 is not scaled: so Llama 3.2's builder makes a tied Llama without rope scaling.
    yield "Llama 3.1's rope scaling (1: on)", float(getattr(rope, "scale_factor", 1) != 1), float(is_scaled)
    if is_scaled:
        for key, attribute in _ROPE_SCALING.items():
            yield f"rope scaling {key}", getattr(rope, attribute), settings.get(key)
    if isinstance(attention, Gemma2Attention):
        yield from _gemma2_settings(decoder, attention, config)


def _gemma2_settings(
    decoder: TransformerDecoder, attention: Gemma2Attention, config: dict[str, Any]
) -> Iterator[tuple[str, float, float | None]]:
    """Gemma 2's own settings. To transformers null means none, and a missing key means the value that Gemma 2 was published with."""
    for key, built, default in (
        ("attn_logit_softcapping", attention.softcapping, 50.0),
        ("final_logit_softcapping", getattr(decoder.output, "cap", None), 30.0),
        ("sliding_window", attention.sliding_window_size, 4096),
    ):
        yield f"{key} (0: none)", built or 0, config.get(key, default) or 0
    yield "query scale", attention.scaling, config.get("query_pre_attn_scalar", 256) ** -0.5


def _is_same(built: float, stored: float) -> bool:
    """Whether two settings are equal in fp32: a config.json made from GGUF has the epsilon 1e-5 as 9.999999747378752e-06."""
    if not (isinstance(stored, (int, float)) and isinstance(built, (int, float))):
        return built == stored
    first, second = torch.tensor([built, stored], dtype=torch.float32, device="cpu").tolist()
    return first == second


def _format(value: object) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
