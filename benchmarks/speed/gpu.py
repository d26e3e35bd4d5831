"""The speed of Qwen3-4B's shapes on this GPU with finch's recipe, torchtune's and TRL's trainer, each in a process of its own, one after the other.

    python -m benchmarks.speed.gpu [--quick] [--device cpu] [--out FOLDER]

Needs no weights and no network; the page is that of `finch doctor --gpu`, speed.json and speed.md. Qwen3-1.7B, 0.6B or less is taken where 4B
does not fit, and the page says so; a tiny model on the CPU. The share of the matrix rate counts what finch's own step needs for every
contender. Expected seconds are `finch check --exact`'s at the rates that this machine has just shown: the least that a step can take. Contenders
that are not installed are named and left out. TRL is padded unless flash-attn is installed. The first lines say what cuDNN's attention
costs where lengths change.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import resource
import runpy
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from finch_full_finetune import FinchFullFinetune
from omegaconf import DictConfig, OmegaConf
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

from benchmarks.tiny_job import ROOT, environment
from finch.base.dtensor import to_local
from finch.config.parser import read
from finch.data.dataset import row_lengths
from finch.distributed.precision import Precision, precision_of
from finch.models.qwen3 import SIZE_0_6B, SIZE_1_7B, qwen3
from finch.plan.estimate.fake_step import StepEstimate, estimate_step
from finch.plan.estimate.formula import Rows, memory_by_formula
from finch.plan.estimate.step_time import Rates
from finch.plan.gpu_check.host import host_rates
from finch.plan.gpu_check.machine import copy_rate, matrix_rate
from finch.plan.gpu_check.models import (
    BATCH,
    MEDIUM,
    QWEN3_4B,
    TARGETS,
    TINY,
    Model,
    Row,
    dataset_of,
    qwen3_model,
    random_rows,
    step_config,
    write_config,
    write_tokenizer,
)
from finch.plan.gpu_check.phases import Phase, run_phases
from finch.plan.gpu_check.processes import Ranks
from finch.plan.gpu_check.report import Check
from finch.training.loaded_model import LoadedModel
from finch.training.model import decoder_on_meta

PHASE = Phase("speed", "benchmarks.speed.gpu:run", 300, 90)
NUM_ROWS, PACK = 64 * BATCH, 1360
"""Rows, and tokens of a pack, as many as ``BATCH`` rows have in the mean."""
_PLAN_LENGTHS = range(41, 61)
LARGE = (QWEN3_4B, qwen3_model("Qwen3-1.7B", SIZE_1_7B), qwen3_model("Qwen3-0.6B", SIZE_0_6B), MEDIUM["Q"])
_WARMUP, _MAX_STEPS, _BLOCK_S = 3, 20, 5.0
_ROOM, _CONTEXT_BYTES = 1.1, 10**9  # over the computed peak, for what it does not count
_LEAST_S = 20.0  # to start a contender on a GPU
_IN_FOUR = {"batch_size": BATCH // 4, "gradient_accumulation_steps": 4, "enable_activation_checkpointing": True}


@dataclass(frozen=True)
class Contender:
    """A way to train; ``changes`` are those of the shipped config."""

    program: str
    changes: dict[str, Any]
    is_quick: bool = False
    is_packed: bool = False


CONTENDERS = {
    "finch as shipped": Contender("finch", {}, is_quick=True),
    "finch, compile": Contender("finch", {"compile": True}, is_quick=True),
    "finch, 4 x 4, checkpointing": Contender("finch", _IN_FOUR),
    "finch, padded": Contender("finch", {"padding_free": False}),
    "torchtune, padded, compile": Contender("torchtune", {"compile": True}, is_quick=True),
    "TRL": Contender("trl", {}),
    "torchtune, packed": Contender("torchtune", {"batch_size": 1}, is_packed=True),
}


def seed_rows(tokenizer: Any, *, vocab_size: int, packed: bool) -> Any:
    """A ``dataset`` for a config of finch's or torchtune's: as many rows as a contender takes."""
    return dataset_of(random_rows(vocab_size, NUM_ROWS, has_prefix=True), PACK if packed else 0)


def no_tokenizer(vocab_size: int) -> Any:
    """Stands where a config needs a tokenizer: rows of seeds have tokens."""
    return SimpleNamespace(pad_id=0, eos_id=0, max_seq_len=None, vocab_size=vocab_size)


def run(check: Check) -> None:
    dtype = "fp32" if check.device == "cpu" else "bf16"
    _time_plans(check)
    model = choose_model(check, dtype)
    if model is None:
        return
    rows = random_rows(model.sizes["vocab_size"], NUM_ROWS, has_prefix=True)
    mean = round(sum(len(row["tokens"]) for row in rows) / len(rows))
    device = torch.device(check.device)
    rate = matrix_rate(device, precision_of(dtype).compute, BATCH * mean)
    rates = Rates(rate, copy_rate(device), host_rates(check.device)[0])
    needed_flops = 0
    for name, contender in CONTENDERS.items():
        if check.quick and not contender.is_quick:
            continue
        if contender.program == "trl" and not (find_spec("trl") and find_spec("transformers")):
            check.not_run(name, "trl is not installed")
        elif check.has_time(name, 0 if check.device == "cpu" else _LEAST_S):
            with check.case(name):
                result, estimate = _measure(check, model, dtype, contender, mean)
                needed_flops = needed_flops or (estimate.needed_flops if estimate else 0)
                needed_s, lengths = needed_flops / (rate * 1e12), _tokens_per_step(contender, rows)
                _record(check, f"{model.name}, {name}", result, lengths, needed_s, estimate, rates)


def _time_plans(check: Check) -> None:
    """The first call at each of several lengths, which have cuDNN build a plan, and the second: why finch keeps cuDNN's attention off."""
    device = torch.device(check.device)
    if device.type != "cuda":
        check.not_run("milliseconds per new length with cuDNN attention", "a CPU has no cuDNN attention")
        return
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    for is_enabled in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(is_enabled)
        times = []
        for length in [40, *_PLAN_LENGTHS, *_PLAN_LENGTHS]:
            row = torch.randn(1, 32, length, 128, device=device, dtype=torch.bfloat16, requires_grad=True)
            torch.cuda.synchronize()
            start = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(row, row, row, is_causal=True).sum().backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        number = len(_PLAN_LENGTHS)
        first, again = (1000 * sum(part) / number for part in (times[1 : number + 1], times[number + 1 :]))
        name = f"cuDNN attention {'on' if is_enabled else 'off'}: milliseconds per new length"
        check.measured(name, first, note=f"{again:.3g} when the length comes again")
    torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def choose_model(check: Check, dtype: str, disk_factor: int = 0) -> Model | None:
    """The largest model whose step fits by the formula, and ``disk_factor`` times its weights the disk; says so where that is not the first."""
    candidates = (TINY["Q"],) if check.device == "cpu" else LARGE
    disk = shutil.disk_usage(check.folder).free
    for model in candidates:
        cfg = step_config(check.folder, model, device=check.device, dtype=dtype)
        decoder = decoder_on_meta(cfg, precision_of(dtype))[0]
        needed = int(_ROOM * memory_by_formula(decoder, cfg, Rows(), ranks=1)["peak"]) + _CONTEXT_BYTES
        free = torch.cuda.mem_get_info()[0] if check.device == "cuda" else needed
        weights = disk_factor * sum(weight.nbytes for weight in decoder.parameters())
        if needed <= free and weights <= disk:
            number = sum(weight.numel() for weight in decoder.parameters())
            check.measured("model", model.name, note=f"{number:,} parameters, random weights, {dtype}")
            return model
        sizes = f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        if weights > disk:
            sizes = f"needs {weights / 1e9:.1f} GB of disk, {disk / 1e9:.1f} GB are free"
        remedy = "too little for any model" if model is candidates[-1] else "the next smaller model is taken"
        check.not_run(model.name, f"{sizes}: {remedy}")
    return None


def _measure(
    check: Check, model: Model, dtype: str, contender: Contender, mean: int
) -> tuple[dict[str, Any], StepEstimate | None]:
    """What the contender's process reports and, computed meanwhile, what `finch check --exact` says of finch's step."""
    folder = Path(tempfile.mkdtemp(dir=check.folder))
    changes, vocab_size = {**contender.changes}, model.sizes["vocab_size"]
    changes["tokenizer"] = {"_component_": f"{__name__}.no_tokenizer", "vocab_size": vocab_size}
    rows = {"vocab_size": vocab_size, "packed": contender.is_packed}
    changes["dataset"] = {"_component_": f"{__name__}.seed_rows", **rows}
    if contender.program == "torchtune":
        weights = {"sizes": dict(model.sizes), "dtype": dtype, "device": check.device}
        changes["checkpointer"] = {"_component_": f"{__name__}.RandomCheckpointer", **weights}
        changes |= {"lr_scheduler": None, "optimizer_in_bwd": False, "max_steps_per_epoch": 10**6}
    file = write_config(folder, model, device=check.device, dtype=dtype, epochs=1000, **changes)
    arguments = {"program": contender.program, "file": file}
    running = Ranks("contender", f"{__name__}:contend", arguments, folder)
    estimate = None
    if contender.program == "finch" and "compile" not in contender.changes:
        estimate = estimate_step("finch_full_finetune", read(["--config", file]), ranks=1, rows=Rows(mean, TARGETS))
    running.finish(check.end)
    if any(running.codes):
        raise RuntimeError(running.last_lines())
    return json.loads((folder / "result.json").read_text(encoding="utf-8")), estimate


def _tokens_per_step(contender: Contender, rows: list[Row]) -> list[int]:
    """Of the first steps."""
    lengths = [len(row["tokens"]) for row in rows]
    if contender.is_packed:
        return [sum(row_lengths(pack)) for pack in dataset_of(rows, PACK).packs]
    return [sum(step) for step in zip(*[iter(lengths)] * BATCH, strict=False)]


def _record(
    check: Check,
    name: str,
    result: dict[str, Any],
    lengths: list[int],
    needed_s: float,
    estimate: StepEstimate | None,
    rates: Rates,
) -> None:
    """``needed_s``: of a step at the matrix rate."""
    steps, seconds = result["steps"], result["seconds"]
    tokens = sum(itertools.islice(itertools.cycle(lengths), _WARMUP, _WARMUP + steps))
    check.measured(f"{name}: tokens/s", tokens / seconds, note=f"{seconds / steps:.3g} s per step, {steps} steps")
    if needed_s:
        share = needed_s * tokens / (sum(lengths) / len(lengths)) / seconds
        check.measured(f"{name}: share of the matrix rate", share, note="needed: without padding and recomputation")
    if estimate is not None:
        limits = rates.seconds(estimate)
        bound = max(limits, key=limits.__getitem__)
        note = f"at least, bound by {bound}: finch check --exact"
        check.measured(f"{name}: seconds per step", seconds / steps, expected=limits[bound], note=note)
    is_cuda = result["launches"] is not None
    peak, note = (estimate.device_peak / 1e9, "finch check --exact") if estimate and is_cuda else (None, "")
    check.measured(f"{name}: peak memory, GB", result["peak_bytes"] / 1e9, expected=peak, note=note)
    if is_cuda:
        check.measured(f"{name}: kernels, copies and fills per step", result["launches"])
        check.measured(f"{name}: share of the time in which the device is idle", result["idle"])


def _meter(file: Path, device: torch.device) -> Iterator[None]:
    """Goes on after each optimizer step in this process: times some, profiles one more on a GPU, writes the result and ends the process."""
    for _ in range(_WARMUP):
        yield
    is_cuda, result = device.type == "cuda", dict[str, Any](launches=None, idle=None)
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start, steps = time.perf_counter(), 0
    while steps < _MAX_STEPS and (steps < 2 or time.perf_counter() - start <= _BLOCK_S):
        yield
        steps += 1
    if is_cuda:
        torch.cuda.synchronize()
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.cuda.max_memory_allocated() if is_cuda else host
    result |= {"steps": steps, "seconds": time.perf_counter() - start, "peak_bytes": peak}
    if is_cuda:
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            start = time.perf_counter()
            yield
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
        kernels = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
        spans = sorted(
            (event.time_range.start, event.time_range.end) for event in kernels if not event.is_user_annotation
        )
        busy, last = 0.0, -1.0
        for begin, end in spans:
            busy += max(0.0, end - max(begin, last))
            last = max(last, end)
        result |= {"launches": len(spans), "idle": 1 - busy / 1e6 / seconds}
    file.write_text(json.dumps(result), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def contend(program: str, file: str) -> None:
    """In the process of a contender: trains until the meter ends the process."""
    cfg: Any = OmegaConf.load(file)
    meter = _meter(Path(file).parent / "result.json", torch.device(cfg.device))
    next(meter)
    register_optimizer_step_post_hook(lambda *_: next(meter))
    {"finch": _finch, "torchtune": _torchtune, "trl": _trl}[program](file)


class RandomModel(LoadedModel):
    """Random weights that are made on the device, without a pretrained folder."""

    base: Any = SimpleNamespace(window=None, files=())

    def __init__(self, cfg: DictConfig, precision: Precision, **_: Any) -> None:
        super().__init__(cfg, precision, has_files=False)

    def load_pretrained(self, seed: int) -> None:
        for weight in self.decoder.parameters():
            torch.nn.init.normal_(to_local(weight.detach()), std=0.02)


def _finch(file: str) -> None:
    cfg = read(["--config", file])
    recipe = FinchFullFinetune(cfg)
    recipe.model_class = RandomModel
    recipe.setup(cfg)
    recipe.train()


class RandomCheckpointer:
    """A ``checkpointer`` for torchtune's recipes: random weights in the place of a file's."""

    def __init__(self, sizes: Any, dtype: str, device: str, **_: Any) -> None:
        self._sizes = dict(sizes)
        self._options: dict[str, Any] = {"dtype": precision_of(dtype).weights, "device": device}

    def load_checkpoint(self) -> dict[str, Any]:
        with torch.device("meta"):
            shapes = qwen3(**self._sizes).state_dict()
        return {
            "model": {name: torch.empty(like.shape, **self._options).normal_(std=0.02) for name, like in shapes.items()}
        }


def _torchtune(file: str) -> None:
    """torchtune's recipe for one device."""
    recipe = "full_finetune_single_device"
    sys.argv = [recipe, "--config", file]
    folder = Path(str(importlib.import_module("torchtune").__file__)).parents[1] / "recipes"
    runpy.run_path(str(folder / f"{recipe}.py"), run_name="__main__")


def _trl(file: str) -> None:
    """TRL's SFTTrainer: padding-free where flash attention is installed, else padded."""
    datasets, transformers, trl = map(importlib.import_module, ("datasets", "transformers", "trl"))
    cfg: Any = OmegaConf.load(file)
    sizes = {name: value for name, value in cfg.model.items() if name != "_component_"}
    has_flash = cfg.device == "cuda" and find_spec("flash_attn") is not None
    config = transformers.Qwen3Config(**Model("B", cfg.model["_component_"], sizes).huggingface_config())
    options = {"attn_implementation": "flash_attention_2" if has_flash else "sdpa"}
    with torch.device(cfg.device):
        network = transformers.AutoModelForCausalLM.from_config(
            config, dtype=precision_of(cfg.dtype).weights, **options
        )
    arguments = trl.SFTConfig(
        output_dir=cfg.output_dir, per_device_train_batch_size=BATCH, num_train_epochs=1000, learning_rate=2e-5,
        lr_scheduler_type="constant", max_grad_norm=1.0, weight_decay=0.0, optim="adamw_torch_fused", use_cpu=cfg.device == "cpu",
        train_sampling_strategy="sequential", gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1,
        disable_tqdm=True, bf16=False, max_length=None, completion_only_loss=True, padding_free=has_flash,
    )  # fmt: skip
    rows = [
        {"input_ids": row["tokens"], "completion_mask": [int(label != -100) for label in row["labels"]]}
        for row in random_rows(sizes["vocab_size"], NUM_ROWS, has_prefix=True)
    ]
    write_tokenizer(Path(file).parent)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(Path(file).parent)
    data = datasets.Dataset.from_list(rows)
    trl.SFTTrainer(model=network, args=arguments, train_dataset=data, processing_class=tokenizer).train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three contenders, at most a minute and a half")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="for speed.json and speed.md")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ |= environment(ROOT, ROOT / "recipes")
    is_done = run_phases(options.out / "speed", device=options.device, ranks=1, quick=options.quick, phases=[PHASE])
    sys.exit(not is_done)


if __name__ == "__main__":
    main()
