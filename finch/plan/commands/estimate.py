"""`finch check --exact`: what a step of a config takes on given ranks, from that step on fake tensors. Needs no weights and no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from finch.base.errors import UsageError, UserError, one_line
from finch.base.files import gigabytes
from finch.cli.arguments import positive
from finch.cli.early_checks import only_errors_logged, read_job
from finch.cli.run import refuse_options, take_config
from finch.config.instantiate import find_config

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from finch.plan.estimate.step_time import Rates

USAGE = "finch check --exact CONFIG [--gpus N] [--gpu-memory GB] [option ...] [key=value ...] [~key] [method=NAME]"
_RATES = {
    "--matmul-tflops": "of matrix products in TFLOP/s",
    "--memory-gb-s": "of copies on the GPU, GB/s read and written",
    "--launch-us": "of the host per operator, in us (default: measured here)",
    "--collective-us": "of the host per collective, in us (default: measured here)",
    "--bandwidth-gb-s": "of one rank to the others in one direction, in GB/s",
    "--node-bandwidth-gb-s": "the same to a rank of another node (default: as to all)",
}
_LIMITS = {
    "products": "matrix products at {matmul_tflops:g} TFLOP/s",
    "memory": "reading and writing at {memory_gb_s:g} GB/s",
    "host": "the host at {launch_us:.3g} us per operator and {collective_us:.3g} us per collective",
    "network": "communication at {bandwidth_gb_s:g} GB/s, {node_bandwidth_gb_s:g} GB/s between nodes",
}
"""What may bound a step, and what the report says."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options. CONFIG and its overrides are what the parser leaves over."""
    parser.usage = USAGE
    parser.description = (
        "Runs one step of the recipe at the config's real shapes on fake tensors, and prints what it takes: memory of a rank by "
        "part, collectives, operations, time at given rates, and what would save memory if it does not fit."
    )
    parser.epilog = "Exit code: 0 if the step fits, 1 if not."
    add = parser.add_argument
    add("--config", metavar="CONFIG", help="a YAML file, or the name of a config of finch; also the first word")
    text = "ranks on all nodes (default: 1)"
    add("--gpus", "--nproc_per_node", "--nproc-per-node", type=positive(int), default=1, metavar="N", help=text)
    memory = "of one GPU, in 1e9 bytes; without it nothing is compared"
    add("--gpu-memory", type=positive(float), metavar="GB", help=memory)
    add("--rates", metavar="FILE", help="the GPU's rates, which give the time: gpu_check.json of finch doctor --gpu")
    for option, text in _RATES.items():
        add(option, type=positive(float), metavar="R", help=text)
    add("--gpus-per-node", type=positive(int), default=8, metavar="N", help="(default: 8)")
    text = "tokens of a row (default: the longest of the config's files; 85, TOFU's mean, without them)"
    add("--seq", type=positive(int), metavar="S", help=text)
    text = "target tokens of a row (default: their mean share; TOFU's is 37 of 85)"
    add("--targets", type=positive(int), metavar="T", help=text)
    add("--json", action="store_true", help="one JSON object, in bytes, operations and seconds")


def main(options: argparse.Namespace, rest: Sequence[str]) -> None:
    """Prints the estimate; ends the process with 1 if the step does not fit.

    Raises:
        UserError: a mistake in the arguments or the config.
    """
    words = list(rest)
    options.config = options.config or take_config(words)
    if options.config is None:
        raise UsageError(f"CONFIG is missing: {USAGE}")
    find_config(options.config)  # before torch is imported
    refuse_options(words, "finch check --exact")
    with only_errors_logged():  # reading a config logs what a run would
        found = _estimate(options, words)
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for title, text in _lines(found):
            print(f"{title:<14}{text}")
    sys.exit(int(found["fits"] is False))


def _estimate(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    """All that is known of the step, in bytes, operations and seconds; ``fits``: None where there is no limit."""
    import torch

    from finch.config.instantiate import build
    from finch.data.dataset import load_dataset
    from finch.data.row_files import nodes_of
    from finch.data.stats import collect_stats
    from finch.plan.estimate.fake_step import candidates, estimate_step
    from finch.plan.estimate.formula import GATHERED, HOST_PARTS, TOFU_TARGETS, TOFU_TOKENS, Rows, longest_row
    from finch.training.config_checks import check

    recipe, cfg = read_job(options.config, overrides, ranks=options.gpus, is_here=False)
    rows = Rows() if options.seq is None else Rows(options.seq, max(1, options.seq * TOFU_TARGETS // TOFU_TOKENS))
    notes: tuple[str, ...] = ()
    if options.seq is None and all(node.get("data_files") for node in nodes_of(cfg.dataset)):
        try:
            samples = load_dataset(cfg, "dataset", build(cfg.tokenizer, "tokenizer"))
            rows = longest_row(samples, collect_stats(samples, 0, 1))
        except UserError as error:  # the files are elsewhere, or `finch check` names what is wrong with them
            notes = (one_line(f"rows not read ({error}): {rows.seq} tokens, TOFU's mean, were taken; give --seq"),)
    rows = replace(rows, targets=options.targets or rows.targets)
    if rows.targets >= rows.seq:
        raise UserError(
            f"--targets {rows.targets} must be below --seq {rows.seq}: the first token is no target; give fewer"
        )
    check(cfg, torch.device("cuda"), options.gpus)
    rates = _rates(options, cfg)
    step = estimate_step(recipe, cfg, ranks=options.gpus, rows=rows)
    limit = None if options.gpu_memory is None else int(options.gpu_memory * 1e9)
    fits = None if limit is None else step.device_peak <= limit
    copies, (nodes, rest) = {}, divmod(options.gpus, options.gpus_per_node)
    if rates.node_bandwidth_gb_s and nodes > 1 and not rest and cfg.data_parallel_replicate_dim == 1:
        cfg.data_parallel_replicate_dim, cfg.data_parallel_shard_dim = nodes, -1
        other = estimate_step(recipe, cfg, ranks=options.gpus, rows=rows)
        seconds = rates.seconds(other, options.gpus_per_node)
        copies = {"number": nodes, "device_peak": other.device_peak, "seconds": seconds}
    changes = [*map(" ".join, candidates(cfg))]
    if not cfg.fsdp_reshard_after_forward and step.memory.get(GATHERED):
        changes.insert(0, "fsdp_reshard_after_forward=True")
    if cfg.batch_size % 2 == 0:  # else a step would have more samples
        changes.append(f"batch_size={cfg.batch_size // 2} --gpus {2 * options.gpus}")
    kinds = ("kind", "calls", "bytes", "sent_bytes")
    return {
        "config": options.config,
        "ranks": options.gpus,
        **{key: cfg[key] for key in ("dtype", "batch_size", "gradient_accumulation_steps")},
        "row": asdict(rows),
        **vars(step),
        "notes": notes + step.notes,
        "data_ranks": options.gpus // cfg.tensor_parallel_dim,
        "on_host": HOST_PARTS if step.is_offloaded else (),
        "device_peak": step.device_peak,
        "collectives": [dict(zip(kinds, row, strict=True)) for row in step.summed_collectives()],
        "sent_bytes": step.sent_bytes,
        "needed_flops": step.needed_flops,
        "rates": vars(rates),
        "seconds": rates.seconds(step, options.gpus_per_node),
        "with_a_copy_per_node": copies,
        "gpu_memory": limit,
        "fits": fits,
        "saves_memory": changes if fits is False else (),
    }


def _rates(options: argparse.Namespace, cfg: DictConfig) -> Rates:
    """Those of the file, on top of them those of the command line, and of the host this machine's."""
    from finch.distributed.precision import precision_of
    from finch.plan.estimate.step_time import Rates, read_rates
    from finch.plan.gpu_check.host import host_rates

    rates = Rates()
    if options.rates is not None:
        rates = read_rates(options.rates, str(precision_of(cfg.dtype).compute).removeprefix("torch."))
    rates = replace(rates, **{name: value for name in vars(rates) if (value := getattr(options, name)) is not None})
    if rates.node_bandwidth_gb_s and not rates.bandwidth_gb_s:
        raise UserError("--node-bandwidth-gb-s needs --bandwidth-gb-s, the rate inside a node; give both")
    if rates.launch_us is None or rates.collective_us is None:
        launch_us, collective_us = host_rates()
        rates = replace(
            rates, launch_us=rates.launch_us or launch_us, collective_us=rates.collective_us or collective_us
        )
    return rates


def _lines(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The report: titles and texts."""
    ranks, row, limit, peak = found["ranks"], found["row"], found["gpu_memory"], found["device_peak"]
    shards = f", weights divided over {found['shards']}" if found["shards"] > 1 else ""
    share = "all" if found["trained"] == found["parameters"] else f"{found['trained']:,}"
    yield (
        "config",
        f"{found['config']}, {ranks} rank{'s' if ranks > 1 else ''}{shards}; {found['dtype']}; computed on fake tensors",
    )
    yield "parameters", f"{found['parameters']:,}, {share} trained"
    yield (
        "a step",
        f"{found['gradient_accumulation_steps']} x {found['batch_size']} rows of {row['seq']} tokens with {row['targets']} targets on a rank: "
        f"{found['tokens']:,} tokens in the layers, {found['targets']:,} in the output layer",
    )
    yield "memory", f"of a rank at the peak, which is in the {found['peak_phase']}"
    for part, size in sorted(found["memory"].items(), key=lambda item: -item[1]):
        if size >= found["peak"] / 10_000:
            yield "", f"  {part + ' (host)' * (part in found['on_host']):<32}{gigabytes(size):>12}"
    yield "", f"  {'peak':<32}{gigabytes(peak):>12}"
    yield "", f"  {'before the step':<32}{gigabytes(sum(found['between_steps'].values())):>12}"
    yield "", "not counted: the CUDA context (about 0.5 GB), memory inside an operation, fragmentation"
    if found["collectives"]:
        yield "collectives", "of a step; bytes of the complete tensors, and what a rank sends in a ring"
        for kind, calls, size, sent in (each.values() for each in found["collectives"]):
            yield "", f"  {kind:<20}{calls:>6} x{gigabytes(size):>12}{gigabytes(sent):>12}"
        yield "", f"  {'sent by a rank':<28}{'':>12}{gigabytes(found['sent_bytes']):>12}"
    else:
        yield "collectives", "none: one rank"
    yield (
        "operations",
        f"{sum(found['flops'].values()) / 1e12:,.2f} TFLOP per rank in matrix products and attention, {found['needed_flops'] / 1e12:,.2f} without recomputation",
    )
    yield (
        "",
        f"{sum(found['launches'].values()):,} operators launched, which read and write {gigabytes(sum(found['moved_bytes'].values()))}",
    )
    yield from _times(found)
    yield from (("note", note) for note in found["notes"])
    if limit is not None and found["fits"]:
        yield "fits", f"into {limit / 1e9:g} GB, {gigabytes(limit - peak)} are left for what is not counted"
    elif limit is not None:
        yield "too large", f"for {limit / 1e9:g} GB by {gigabytes(peak - limit)}"
    for number, change in enumerate(found["saves_memory"]):
        yield "" if number else "saves memory", change


def _times(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    seconds, rates, copies = found["seconds"], found["rates"], found["with_a_copy_per_node"]
    between = rates["node_bandwidth_gb_s"] or rates["bandwidth_gb_s"]
    for number, (name, value) in enumerate(seconds.items()):
        text = _LIMITS[name].format(**{**rates, "node_bandwidth_gb_s": between})
        yield "" if number else "time", f"{value:.3f} s of {text}"
    if len(seconds) == 1:
        others = ", ".join(option for option in _RATES if not option.endswith("-us"))
        yield "", f"for the rest give --rates, or {others}"
        return
    bound = max(seconds, key=seconds.__getitem__)
    least, most = seconds[bound], sum(seconds.values())
    yield "bound", f"{bound}: a step takes at least {least:.3f} s, and {most:.3f} s if nothing overlaps"
    yield "", f"at most {found['targets'] * found['data_ranks'] / least:,.0f} target tokens/s on all ranks"
    if copies and copies["device_peak"] <= (found["gpu_memory"] or copies["device_peak"]):
        other = max(copies["seconds"].values())
        if other < least:
            text = f"data_parallel_replicate_dim={copies['number']}: at least {other:.3f} s, since only gradients go between nodes"
            yield "faster", f"{text}; {gigabytes(copies['device_peak'])} at the peak"
