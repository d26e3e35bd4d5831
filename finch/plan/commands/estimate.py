"""`finch estimate`: what a step of a config takes on given ranks, from that step on fake tensors. Needs no weights, rows or GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from finch.base.errors import UsageError, UserError
from finch.base.files import gigabytes
from finch.cli.arguments import Parser, positive
from finch.cli.early_checks import only_errors_logged, read_job
from finch.cli.run import refuse_options, take_config
from finch.config.instantiate import find_config

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from finch.plan.estimate.fake_step import StepEstimate
    from finch.plan.estimate.formula import Rows

USAGE = "finch estimate CONFIG [--gpus N] [--gpu-memory GB] [option ...] [key=value ...] [~key] [method=NAME]"
_RATES = ("--matmul-tflops", "--memory-gb-s", "--launch-us", "--bandwidth-gb-s")


def main(_: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Prints the estimate; ends the process with 1 if the step does not fit.

    Raises:
        UserError: a mistake in the arguments or the config.
    """
    options, overrides = _parse(arguments)
    with only_errors_logged():  # reading a config logs what a run would
        has_fit = _report(options, overrides)
    sys.exit(0 if has_fit else 1)


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog="finch estimate",
        usage=USAGE,
        description="Runs one step of the recipe at the config's real shapes on fake tensors, and prints what it takes: memory of a rank by "
        "part, collectives, operations, time at given rates, and what would save memory if it does not fit.",
        epilog="Exit code: 0 if the step fits, 1 if not.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        metavar="CONFIG",
        help="a YAML file, or the name of a config that comes with finch; also the first word",
    )
    parser.add_argument("--gpus", type=positive(int), default=1, metavar="N", help="ranks on all nodes (default: 1)")
    parser.add_argument(
        "--gpu-memory",
        type=positive(float),
        metavar="GB",
        help="of one GPU, in 1e9 bytes; without it nothing is compared",
    )
    parser.add_argument(
        "--rates", metavar="FILE", help="the GPU's rates, which give the time: gpu-check's gpu_check.json"
    )
    helps = (
        "of matrix products in TFLOP/s",
        "of copies on the GPU, GB/s read and written",
        "of the host per operator, in us",
    )
    for option, text in zip(_RATES, (*helps, "of one rank to the others in one direction, in GB/s"), strict=True):
        parser.add_argument(option, type=positive(float), metavar="R", help=text)
    parser.add_argument("--seq", type=positive(int), metavar="S", help="tokens of a row (default: 85, TOFU's mean)")
    parser.add_argument(
        "--targets", type=positive(int), metavar="T", help="target tokens of a row (default: 37 of 85, TOFU's mean)"
    )
    options, words = parser.parse_known_args(arguments)
    options.config = options.config or take_config(words)
    if options.config is None:
        raise UsageError(f"CONFIG is missing: {USAGE}")
    find_config(options.config)  # before torch is imported
    refuse_options(words, "finch estimate")
    return options, words


def _report(options: argparse.Namespace, overrides: Sequence[str]) -> bool:
    """Prints all sections; whether the step fits, True where there is no limit."""
    import torch

    from finch.plan.estimate.fake_step import candidates, estimate_step
    from finch.training.config_checks import check

    rows = _rows(options)

    recipe, cfg = read_job(options.config, overrides, ranks=options.gpus)
    check(cfg, torch.device("cuda"), options.gpus)
    step = estimate_step(recipe, cfg, ranks=options.gpus, rows=rows)
    _print_model(options, cfg, step, rows)
    _print_memory(step)
    _print_collectives(step)
    _print_time(options, cfg, step)
    for note in step.notes:
        _print("note", note)
    if options.gpu_memory is None:
        return True
    limit = int(options.gpu_memory * 1e9)
    if step.device_peak <= limit:
        free = gigabytes(limit - step.device_peak)
        _print("fits", f"into {options.gpu_memory:g} GB, {free} are left for what is not counted")
        return True
    _print("too large", f"for {options.gpu_memory:g} GB by {gigabytes(step.device_peak - limit)}")
    for number, change in enumerate((*map(" ".join, candidates(cfg)), f"--gpus {2 * options.gpus}")):
        _print("" if number else "saves memory", change)
    return False


def _print_model(options: argparse.Namespace, cfg: DictConfig, step: StepEstimate, rows: Rows) -> None:
    ranks = options.gpus
    shards = f", weights divided over {step.shards}" if step.shards > 1 else ""
    share = "all" if step.trained == step.parameters else f"{step.trained:,}"
    _print(
        "config",
        f"{options.config}, {ranks} rank{'s' if ranks > 1 else ''}{shards}; {cfg.dtype}; computed on fake tensors",
    )
    _print("parameters", f"{step.parameters:,}, {share} trained")
    _print(
        "a step",
        f"{cfg.gradient_accumulation_steps} x {cfg.batch_size} rows of {rows.seq} tokens with {rows.targets} targets on a rank: "
        f"{step.tokens:,} tokens in the layers, {step.targets:,} in the output layer",
    )


def _print_memory(step: StepEstimate) -> None:
    from finch.plan.estimate.fake_step import HOST_PARTS

    _print("memory", f"of a rank at the peak, which is in the {step.peak_phase}")
    for part, size in sorted(step.memory.items(), key=lambda item: -item[1]):
        if size >= step.peak / 10_000:
            where = " (host)" if step.is_offloaded and part in HOST_PARTS else ""
            _print("", f"  {part + where:<32}{gigabytes(size):>12}")
    _print("", f"  {'peak':<32}{gigabytes(step.device_peak):>12}")
    _print("", f"  {'before the step':<32}{gigabytes(sum(step.between_steps.values())):>12}")
    _print("", "not counted: the CUDA context (about 0.5 GB), memory inside an operation, fragmentation")


def _print_collectives(step: StepEstimate) -> None:
    if not step.collectives:
        _print("collectives", "none: one rank")
        return
    _print("collectives", "of a step; bytes of the complete tensors, and what a rank sends in a ring")
    for kind, count, nbytes, sent in step.summed_collectives():
        _print("", f"  {kind:<20}{count:>6} x{gigabytes(nbytes):>12}{gigabytes(sent):>12}")
    _print("", f"  {'sent by a rank':<28}{'':>12}{gigabytes(step.sent_bytes):>12}")


def _print_time(options: argparse.Namespace, cfg: DictConfig, step: StepEstimate) -> None:
    from finch.distributed.precision import precision_of
    from finch.plan.estimate.step_time import Rates, read_rates

    total = sum(step.flops.values())
    _print(
        "operations",
        f"{total / 1e12:,.2f} TFLOP per rank in matrix products and attention, {step.needed_flops / 1e12:,.2f} without recomputation",
    )
    launches = sum(step.launches.values())
    _print("", f"{launches:,} operators launched, which read and write {gigabytes(sum(step.moved_bytes.values()))}")
    rates = Rates()
    if options.rates is not None:
        rates = read_rates(options.rates, str(precision_of(cfg.dtype).compute).removeprefix("torch."))
    given = {name: value for name in vars(rates) if (value := getattr(options, name)) is not None}
    rates = replace(rates, **given)
    seconds = rates.seconds(step)
    if not seconds:
        _print("time", f"give --rates, or {', '.join(_RATES)}")
        return
    names = {"products": "matrix products at {:g} TFLOP/s", "memory": "reading and writing at {:g} GB/s"}
    names |= {"launches": "launching at {:g} us each", "network": "communication at {:g} GB/s"}
    texts = {
        name: text.format(rate) for (name, text), rate in zip(names.items(), vars(rates).values(), strict=True) if rate
    }
    for number, (name, value) in enumerate(seconds.items()):
        _print("" if number else "time", f"{value:.3f} s of {texts[name]}")
    bound = max(seconds, key=seconds.__getitem__)
    least, most = seconds[bound], sum(seconds.values())
    _print("bound", f"{bound}: a step takes at least {least:.3f} s, and {most:.3f} s if nothing overlaps")
    _print("", f"at most {step.targets * options.gpus / least:,.0f} target tokens/s on all ranks")


def _rows(options: argparse.Namespace) -> Rows:
    from finch.plan.estimate.formula import TOFU_TARGETS, TOFU_TOKENS, Rows

    seq = options.seq or TOFU_TOKENS
    targets = options.targets or max(1, seq * TOFU_TARGETS // TOFU_TOKENS)
    if targets >= seq:
        raise UserError(f"--targets {targets} must be below --seq {seq}: the first token is no target; give fewer")
    return Rows(seq, targets)


def _print(title: str, text: str) -> None:
    print(f"{title:<14}{text}", flush=True)
