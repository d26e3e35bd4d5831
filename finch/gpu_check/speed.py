"""Phase 6: the speed of B with finch's recipe, torchtune's and TRL's trainer, each in a process of its own, one after the other."""

from __future__ import annotations

import importlib
import json
import os
import resource
import runpy
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from finch_full_finetune import FinchFullFinetune
from omegaconf import OmegaConf
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from finch.config.parser import read
from finch.config.schema import FullFinetuneKeys
from finch.distributed.precision import precision_of
from finch.dtensor import to_local
from finch.estimate.fake_step import estimate_step
from finch.estimate.formula import Rows, memory_by_formula
from finch.gpu_check.folders import huggingface_config, write_tokenizer
from finch.gpu_check.machine import matrix_rate, synchronize
from finch.gpu_check.models import BATCH, PREFIX, TARGETS, Model, config_blocks, large_models, random_rows, random_weights, write_config  # fmt: skip
from finch.gpu_check.processes import Ranks
from finch.gpu_check.report import Check
from finch.training.model import decoder_on_meta

_WARMUP, _MAX_STEPS, _BLOCK_S, _PROFILED = 3, 20, 5.0, 1
_ROOM = 1.1  # over the computed peak, and what it does not count
_CONTEXT_BYTES = 10**9
_NUM_ROWS = BATCH * 64
_AT_BEST = {"enable_activation_checkpointing": False}
_SHIPPED = {"batch_size": BATCH // 4, "gradient_accumulation_steps": 4, "enable_activation_checkpointing": True}
_LEAST_S = 20.0

# For each contender the function that trains with it, and the changes of the config.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "finch 16 x 1": ("finch", _AT_BEST),
    "finch as shipped": ("finch", _SHIPPED),
    "finch 16 x 1, cuDNN attention off": ("finch", {**_AT_BEST, "cudnn": False}),
    "finch 16 x 1, padded, compile": ("finch", {**_AT_BEST, "compile": True}),
    "torchtune, padded, compile": ("torchtune", {"compile": True}),
    "TRL": ("trl", {}),
    "torchtune, packed": ("torchtune", {"batch_size": 1, "packed": True}),
}
_QUICK = ("finch 16 x 1", "finch as shipped", "torchtune, padded, compile")


def run(check: Check) -> None:
    is_cpu = check.device == "cpu"
    dtype = "fp32" if is_cpu else "bf16"
    model = choose_model(check, dtype)
    if model is None:
        return
    rows = random_rows(model.sizes["vocab_size"], _NUM_ROWS, prefix=PREFIX)
    mean = sum(len(row["tokens"]) for row in rows) / len(rows)
    rate = matrix_rate(torch.device(check.device), torch.float32 if is_cpu else torch.bfloat16, round(BATCH * mean))
    flops = None
    for name, (kind, changes) in CONTENDERS.items():
        if check.quick and name not in _QUICK:
            continue
        if kind == "trl" and (find_spec("trl") is None or find_spec("transformers") is None):
            check.not_run(name, "trl is not installed")
            continue
        if is_cpu and changes.get("cudnn") is False:
            check.not_run(name, "a CPU has no cuDNN attention")
            continue
        if not check.has_time(name, 0 if is_cpu else _LEAST_S):
            continue
        with check.case(name):
            folder = check.folder / name.replace(" ", "_").replace(",", "")
            folder.mkdir()
            arguments = {"kind": kind, "device": check.device, "dtype": dtype, "folder": str(folder), "model": vars(model) | {"sizes": dict(model.sizes)}, "changes": changes}  # fmt: skip
            running = Ranks("contender", "finch.gpu_check.speed:contend", arguments, folder)
            estimate = _estimate(folder, model, dtype, changes, check.device, mean) if kind == "finch" else None
            if estimate is not None and flops is None:
                flops = estimate.needed_flops
            if not running.wait(check.end):
                running.kill()
                check.not_run(name, "not done before the phase's deadline")
                continue
            if any(running.codes):
                raise RuntimeError(running.last_lines())
            _record(check, f"{model.name}, {name}", json.loads((folder / "result.json").read_text()), rows, rate, flops, estimate)  # fmt: skip


def choose_model(check: Check, dtype: str) -> Model | None:
    """B: the largest model whose step fits by the formula; says so where that is not the first."""
    for model in large_models(check.device):
        cfg = _config(check.folder, model, dtype, check.device, _AT_BEST)
        decoder = decoder_on_meta(cfg, precision_of(cfg.dtype))[0]
        needed = int(_ROOM * memory_by_formula(decoder, cfg, Rows(), ranks=1)["peak"]) + _CONTEXT_BYTES
        free = torch.cuda.mem_get_info()[0] if check.device == "cuda" else needed
        if needed <= free:
            check.measured("B", model.name, note=f"{sum(weight.numel() for weight in decoder.parameters()):,} parameters, random weights")  # fmt: skip
            return model
        check.not_run(model.name, f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free: the next smaller model is taken")  # fmt: skip
    return None


def _record(check: Check, name: str, result: dict[str, Any], rows: Any, rate: float, flops: int | None, estimate: Any) -> None:  # fmt: skip
    first, steps = result["first_step"], result["steps"]
    used = [rows[index % len(rows)] for index in range(first * BATCH, (first + steps) * BATCH)]
    tokens = sum(len(row["tokens"]) for row in used)
    check.measured(f"{name}: tokens/s", tokens / result["seconds"], note=f"{result['seconds'] / steps:.3g} s per step of {BATCH} rows, {steps} steps")  # fmt: skip
    if flops is not None:
        share = flops * steps / result["seconds"] / (rate * 1e12)
        check.measured(f"{name}: share of the matrix rate", share, note="of finch's step without padding and recomputation")  # fmt: skip
    peak = None if estimate is None else estimate.device_peak / 1e9
    check.measured(f"{name}: peak memory, GB", result["peak_bytes"] / 1e9, expected=peak, note="expected: finch estimate" if peak else "")  # fmt: skip
    if result["launches"] is not None:
        check.measured(f"{name}: kernels, copies and fills per step", result["launches"])
        check.measured(f"{name}: share of the time in which the device is idle", result["idle"])


def _estimate(folder: Path, model: Model, dtype: str, changes: dict[str, Any], device: str, mean: float) -> Any:
    """`finch estimate` of the same step, computed while the contender runs."""
    cfg = _config(folder, model, dtype, device, changes, name="estimate")
    return estimate_step("finch_full_finetune", cfg, ranks=1, rows=Rows(round(mean), TARGETS))


def _config(folder: Path, model: Model, dtype: str, device: str, changes: dict[str, Any], name: str = "config") -> Any:
    known = {key: value for key, value in changes.items() if key != "cudnn"}
    dataset = {"_component_": "finch.gpu_check.models.seed_rows", "vocab_size": model.sizes["vocab_size"], "number": _NUM_ROWS, "prefix": PREFIX}  # fmt: skip
    blocks = config_blocks(folder, model, device=device, dtype=dtype, dataset=dataset, epochs=1000, log_level="ERROR", **known)  # fmt: skip
    return read(["--config", write_config(folder, blocks, name)], FullFinetuneKeys)


class Meter:
    """Times the steps of whatever trains in this process, profiles one more, writes the result and ends the process."""

    def __init__(self, file: Path, device: str) -> None:
        self._file, self._device, self._number, self._start = file, torch.device(device), 0, 0.0
        self._result: dict[str, Any] = {"first_step": _WARMUP, "launches": None, "idle": None}
        self._profile: Any = None
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self._number += 1
        if self._number == _WARMUP:
            synchronize(self._device)
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            self._start = time.perf_counter()
        elif self._number > _WARMUP and self._profile is None:
            steps = self._number - _WARMUP
            if steps < 2 or (steps < _MAX_STEPS and time.perf_counter() - self._start < _BLOCK_S):
                return
            synchronize(self._device)
            is_cuda = self._device.type == "cuda"
            host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            peak = torch.cuda.max_memory_allocated() if is_cuda else host
            self._result |= {"steps": steps, "seconds": time.perf_counter() - self._start, "peak_bytes": peak}
            if not is_cuda:
                self._finish()
            self._profile, self._start = profile(activities=[ProfilerActivity.CUDA]), time.perf_counter()
            self._profile.start()
        elif self._profile is not None:
            synchronize(self._device)
            seconds = time.perf_counter() - self._start
            self._profile.stop()
            spans = sorted((event.time_range.start, event.time_range.end) for event in self._profile.events() if event.device_type == DeviceType.CUDA)  # fmt: skip
            busy, last = 0.0, -1.0
            for start, end in spans:
                busy += max(0.0, end - max(start, last))
                last = max(last, end)
            self._result |= {"launches": len(spans), "idle": 1 - busy / 1e6 / seconds}
            self._finish()

    def _finish(self) -> None:
        self._file.write_text(json.dumps(self._result), encoding="utf-8")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def contend(kind: str, device: str, dtype: str, folder: str, model: dict[str, Any], changes: dict[str, Any]) -> None:
    """In the process of a contender: trains until the meter ends the process."""
    if changes.get("cudnn") is False:
        torch.backends.cuda.enable_cudnn_sdp(False)
    Meter(Path(folder) / "result.json", device)
    programs: dict[str, Callable[..., None]] = {"finch": _finch, "torchtune": _torchtune, "trl": _trl}
    programs[kind](Path(folder), Model(**model), dtype, device, changes)


class RandomModel(FinchFullFinetune):
    """The recipe on random weights that are made on the device, without a pretrained folder."""

    base: Any = None

    def build_decoder(self) -> None:
        self.decoder, self.tensor_plan, _ = decoder_on_meta(self.cfg, self.precision)

    def load_base(self) -> None:
        for weight in self.model.decoder.parameters():
            torch.nn.init.normal_(to_local(weight.detach()), std=0.02)


def _finch(folder: Path, model: Model, dtype: str, device: str, changes: dict[str, Any]) -> None:
    cfg = _config(folder, model, dtype, device, changes)
    recipe = RandomModel(cfg)
    recipe.setup(cfg)
    recipe.train()


class RandomCheckpointer:
    """A ``checkpointer`` for torchtune's recipes: random weights in the place of a file's."""

    def __init__(self, config: str, device: str, **_: Any) -> None:
        self._cfg, self._device = OmegaConf.load(config), device

    def load_checkpoint(self) -> dict[str, Any]:
        cfg: Any = OmegaConf.merge(self._cfg, {"tensor_parallel_dim": 1, "custom_sharded_layers": None})
        precision = precision_of(cfg.dtype)
        weights = random_weights(decoder_on_meta(cfg, precision)[0].state_dict(), device=self._device)
        return {"model": {name: weight.to(precision.weights) for name, weight in weights.items()}}


def _torchtune(folder: Path, model: Model, dtype: str, device: str, changes: dict[str, Any]) -> None:
    """torchtune's recipe for one device."""
    import torchtune

    known = {key: value for key, value in changes.items() if key != "packed"}
    file = folder / "torchtune.yaml"
    dataset = {"_component_": "finch.gpu_check.models.seed_rows", "vocab_size": model.sizes["vocab_size"], "number": _NUM_ROWS, "prefix": PREFIX, "packed": "packed" in changes}  # fmt: skip
    dataset |= {"max_seq_len": BATCH * 85} if "packed" in changes else {}
    checkpointer = {"_component_": "finch.gpu_check.speed.RandomCheckpointer", "config": str(file), "device": device}
    logger = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(folder), "filename": "log.txt"}  # fmt: skip
    options = {
        "resume_from_checkpoint": False,
        "gradient_accumulation_steps": 1,
        "max_steps_per_epoch": None,
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "optimizer_in_bwd": False,
        "compile": False,
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
        "metric_logger": logger,
        "checkpointer": checkpointer,
        "epochs": 1000,
        **known,
    }
    blocks = config_blocks(folder, model, device=device, dtype=dtype, dataset=dataset, lr_scheduler=None, **options)
    OmegaConf.save(OmegaConf.create(blocks | {"max_steps_per_epoch": None}), file)
    sys.argv = ["full_finetune_single_device", "--config", str(file)]
    recipes = Path(str(torchtune.__file__)).parents[1] / "recipes"
    runpy.run_path(str(recipes / "full_finetune_single_device.py"), run_name="__main__")


def _trl(folder: Path, model: Model, dtype: str, device: str, _: dict[str, Any]) -> None:
    """TRL's SFTTrainer: padding-free where flash attention is installed, else padded."""
    datasets, transformers, trl = (importlib.import_module(name) for name in ("datasets", "transformers", "trl"))
    has_flash = device == "cuda" and find_spec("flash_attn") is not None
    attention = "flash_attention_2" if has_flash else "sdpa"
    config = transformers.Qwen3Config(**huggingface_config(model))
    with torch.device(device):
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[dtype]), attn_implementation=attention
        )
    arguments = trl.SFTConfig(
        output_dir=str(folder / "run"), per_device_train_batch_size=BATCH, num_train_epochs=1000, learning_rate=2e-5,
        lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.0, optim="adamw_torch_fused", use_cpu=device == "cpu",
        train_sampling_strategy="sequential", gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1,
        disable_tqdm=True, bf16=False, max_length=None, completion_only_loss=True, padding_free=has_flash,
    )  # fmt: skip
    rows = [
        {"input_ids": row["tokens"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in random_rows(model.sizes["vocab_size"], _NUM_ROWS, prefix=PREFIX)
    ]
    data = datasets.Dataset.from_list(rows)
    write_tokenizer(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    trl.SFTTrainer(model=network, args=arguments, train_dataset=data, processing_class=tokenizer).train()
