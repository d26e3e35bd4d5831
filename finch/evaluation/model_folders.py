"""Which folders are evaluated: the pretrained model, a tuned one, a PEFT adapter, or the best epoch of a run; and what the run trained on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finch.base import hub, run_files
from finch.base.errors import UserError, writing
from finch.base.files import make_folder, read_bytes, read_object
from finch.base.log import logger
from finch.base.run_files import inside
from finch.checkpoint.manifest import EXPORTS
from finch.checkpoint.reader import STATE_FILE
from finch.evaluation.wise_ft import check_settings
from finch.models.hf_config import CONFIG, check_folder, read_config
from finch.training.reference import fingerprint_of
from finch.training.run import RunLock
from finch.weights.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, SAFETENSORS, SAFETENSORS_INDEX, indexed_shards

TUNED = "tuned.json"
"""In RUN/average: of which model it is."""
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# Settings of config.json that tuning never changes.
_FIXED = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size"),
    *("num_attention_heads", "num_key_value_heads"),
)


@dataclass(frozen=True)
class ModelFolder:
    """A model to evaluate.

    Attributes:
        option: the command's option that gave it, for messages.
        path: a Hugging Face folder, or a PEFT adapter's.
        run: the run that it is an epoch of; None where the folder itself was given.
        base: of an adapter: the folder of the model that it changes.
    """

    option: str
    path: Path
    run: Path | None = None
    base: Path | None = None

    @property
    def is_adapter(self) -> bool:
        return self.base is not None

    @property
    def label(self) -> str:
        """What a table calls it: the run's or the folder's name."""
        path = (self.run or self.path).resolve()
        return f"{path.parents[1].name}/average" if path.parent.name == run_files.AVERAGE else hub.name_of(path)

    @property
    def results(self) -> Path | None:
        """Where a run keeps the results of its model, of one of its epochs that was given itself, or of its average; None: the model is no run's."""
        if self.run is not None:
            return self.run / run_files.EVALUATION
        if self.option == "--tuned" and run_files.is_epoch(self.path.name) and is_run(self.path.parent):
            return self.path.parent / run_files.EVALUATION / self.path.name
        if self.option == "--tuned" and self.path.parent.name == run_files.AVERAGE and is_run(self.path.parents[1]):
            return self.path.parent / run_files.EVALUATION
        return None

    def output(self, out: Path, key: str) -> Path:
        """The folder of the model's results: a run's own, else one in ``out``, another for each ``key`` of weights and settings, so that a model
        keeps the results of all."""
        name = "base" if self.option == "--base" else self.label
        return self.results or out / f"{name}-{key}"

    def place(self, output: Path, out: Path, *, trust: bool) -> Path:
        """``output``, to write there; raises UserError for a link on the way in a run of someone else's."""
        own = self.results is None
        root = out if own else self.run or self.path.parent
        return inside(root, *output.relative_to(root).parts, is_own=own or trust)

    def make_place(self, output: Path, out: Path, *, trust: bool) -> None:
        """Makes the folder of :meth:`place`; raises UserError as that, and where it cannot be made."""
        with writing(f"--out={out}") if self.results is None else writing(f"{output}", "make it writable"):
            make_folder(self.place(output, out, trust=trust))

    def __str__(self) -> str:
        return f"{self.option}={self.path}"


def labels(folders: Sequence[ModelFolder]) -> list[str]:
    """What a table calls them: those of one label after the folder that each lies in."""
    names = [folder.label for folder in folders]
    return [
        name if names.count(name) == 1 else f"{(folder.run or folder.path).resolve().parent.name}/{name}"
        for folder, name in zip(folders, names, strict=True)
    ]


def find_base(path: Path) -> ModelFolder:
    """
    Raises:
        UserError: the folder is missing, or has no config or no weights.
    """
    check_folder(path, "--base")
    if (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():
        raise UserError(f"--base={path} is an adapter; give the model that it was trained on")
    folder = ModelFolder("--base", path)
    _check_weights(folder)
    return folder


def find_tuned(path: Path, base: ModelFolder, *, of_any_size: bool = False) -> ModelFolder:
    """
    Args:
        path: a Hugging Face folder, a PEFT adapter's, or a run.
        base: the pretrained model.
        of_any_size: it need not be the base, tuned.

    Raises:
        UserError: the folder is missing or no model, a run has no epoch yet, or the model's sizes are not the base's.
    """
    check_folder(path, "--tuned")
    run = None
    if is_run(path):
        run, path = path, _epoch_of(path)
        if (base.path / SAFETENSORS).is_file() or (base.path / SAFETENSORS_INDEX).is_file():
            weights = weight_files(base)
            try:
                check_pretrained(run, base.path, weights)
            except UserError as error:  # two models may well be compared that were not trained one from the other
                logger.warning(str(error).partition(";")[0])
    if (path / ADAPTER_CONFIG).is_file() and not (path / CONFIG).is_file():
        folder = ModelFolder("--tuned", path, run, base.path)
        if not (path / ADAPTER_WEIGHTS).is_file():
            raise UserError(f"{folder} has {ADAPTER_CONFIG} but no {ADAPTER_WEIGHTS}; give the complete adapter")
        return folder
    folder = ModelFolder("--tuned", path, run)
    _check_weights(folder)
    if not of_any_size:
        check_settings(base.path, path, _FIXED)
    return folder


def is_run(path: Path) -> bool:
    """Whether a folder is a run's and no model's."""
    has_run_file = (path / run_files.CONFIG).is_file() or (path / run_files.CELL).is_file()
    return has_run_file and not (path / CONFIG).is_file()


def weight_files(folder: ModelFolder) -> list[Path]:
    """The files that the model's weights are read from; of an adapter its own, without the base's."""
    if folder.is_adapter:
        return [folder.path / ADAPTER_CONFIG, folder.path / ADAPTER_WEIGHTS]
    if shards := indexed_shards(folder.path):
        return [folder.path / name for name in shards]
    if (folder.path / SAFETENSORS).is_file():
        return [folder.path / SAFETENSORS]
    return sorted(folder.path.glob("pytorch_model*.bin"))


def relative_to(error: Exception) -> str:
    """What a message of rows that are missing lacks where a run's config names them by a relative path."""
    remedy = "; paths are relative to the folder where the run was started: start the command there"
    return remedy if re.search("data_files=[^/].* does not exist", str(error)) else ""


def training_questions(run: Path, *, trust: bool = False) -> frozenset[str] | None:
    """The user's first turn of each row of the run's ``dataset``; None where the run has no config or its rows are gone. ``trust``: see
    :func:`finch.evaluation.average.average`."""
    from omegaconf import DictConfig, ListConfig, OmegaConf

    from finch.config.schema import LoraFinetuneKeys
    from finch.data.dataset import load_dataset
    from finch.evaluation.foreign import offline, read_config_of

    file = run / run_files.CONFIG
    if not file.is_file():
        return None
    tokenizer = _FirstTurn()
    try:
        others = LoraFinetuneKeys.model_fields.keys() - {"dataset"}
        cfg = OmegaConf.create(read_config_of(run, others, trust=trust))
        node = cfg.get("dataset")
        nodes = node if isinstance(node, ListConfig) else [node]
        if not all(isinstance(each, DictConfig) and "_component_" in each for each in nodes):
            raise UserError("it has no dataset")
        for each in nodes:
            if each.get("packed"):
                each["packed"] = False
        with offline(not trust):
            rows = load_dataset(cfg, "dataset", tokenizer).data
            for index in range(len(rows)):
                rows[index]
    except (UserError, OSError, KeyError) as error:
        logger.warning(f"{file}: the rows that it trained on are unknown ({error}{relative_to(error)})")
        return None
    return frozenset(tokenizer.questions)


class _FirstTurn:
    """Replaces a tokenizer, and collects what it would tokenize."""

    max_seq_len = None

    def __init__(self) -> None:
        self.questions: set[str] = set()

    def __call__(self, sample: Any, inference: bool = False) -> dict[str, Any]:
        self.questions.update([message.text_content for message in sample["messages"] if message.role == "user"][:1])
        return {"tokens": [0], "mask": [False]}


def check_pretrained(run: Path, base: Path, weights: Sequence[Path]) -> None:
    """Raises UserError if the run's last checkpoint says that it was trained from other files than these ``weights`` of ``base``."""
    states = sorted(run.glob(f"{run_files.CHECKPOINTS}/step_*/{STATE_FILE}"), key=lambda each: each.stat().st_mtime)
    identity = read_object(states[-1]).get("identity") if states else None
    kept = identity.get("digest of the weights") if isinstance(identity, dict) else None
    if kept is not None and kept != fingerprint_of(weights, 0, {})[:16]:
        raise UserError(
            f"{base} has other weight files than the model that {run} was trained from; give that one as --base, or --trust if their weights are equal"
        )


def has_average(run: Path) -> bool:
    """Whether a run has one of its last model: it may have gone on since."""
    average, tuned = run / run_files.AVERAGE / "model" / run_files.HF_CONFIG, run_files.chosen_model(run)
    if not average.is_file() or tuned is None:
        return average.is_file()
    kept = read_object(run / run_files.AVERAGE / TUNED).get("manifest")
    if kept is not None:  # times do not outlive a copy
        is_current = kept == manifest_digest(tuned)
    else:  # of an older finch
        is_current = average.stat().st_mtime >= max((file.lstat().st_mtime for file in tuned.iterdir()), default=0.0)
    if not is_current:
        name = tuned.resolve().name
        logger.warning(
            f"{run / run_files.AVERAGE} is of an earlier model, {name} answers; make it again: finch average {run}"
        )
    return is_current


def manifest_digest(folder: Path) -> str | None:
    """Of the list of a model's files, which has their digests; None for a model that finch has not written."""
    file = folder / EXPORTS
    return hashlib.sha256(read_bytes(file)).hexdigest() if file.is_file() else None


def _epoch_of(run: Path) -> Path:
    """The model of a run: ``best``, else the last epoch. A log line says which where the run has not ended."""
    model, is_training = run_files.chosen_model(run), RunLock(run).holder() is not None
    if model is None:
        state = "is still in its first epoch" if is_training else "has no epoch"
        raise UserError(f"--tuned={run} {state}: there is neither {run_files.BEST} nor epoch_N; train it first")
    if has_average(run):
        logger.warning(
            f"--tuned={run}: its model before the average; --tuned {run}/{run_files.AVERAGE} evaluates the average"
        )
    if is_training:
        rank = "best" if model.name == run_files.BEST else "last"
        logger.warning(f"--tuned={run} is still training; {model.resolve().name}, the {rank} so far, is evaluated")
    return model


def _check_weights(folder: ModelFolder) -> None:
    read_config(folder.path, folder.option)
    if not any((folder.path / name).is_file() for name in (SAFETENSORS, SAFETENSORS_INDEX, *_PICKLED)):
        raise UserError(f"{folder} has {CONFIG} but no weights; give the folder with {SAFETENSORS}")
