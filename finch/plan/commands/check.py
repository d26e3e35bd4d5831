"""`finch check`: what can be known of a run without training. Writes nothing, starts no process group, loads no weights."""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import gc
import inspect
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finch.base.errors import UserError, one_line
from finch.base.extras import missing_after_training
from finch.base.files import existing_part, gigabytes
from finch.base.log import printable
from finch.cli.early_checks import build_model, config_checks, device_of, machine_checks, only_errors_logged, read_job
from finch.cli.run import number_of_ranks, parse_arguments
from finch.config.instantiate import component_of
from finch.config.methods import LORA_RECIPE
from finch.config.resolved import format_value

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from finch.data.dataset import Samples
    from finch.data.mixture import Mixture
    from finch.data.stats import DatasetStats

IGNORE_INDEX = -100  # torch's, which is not imported yet
_MAX_SHOWN = 120  # characters of a part of a row
_HIGH_RATE = 0.1  # of Adam; a model of 0.3 M parameters takes up to 0.02
USAGE = "finch check [--rows N] [--nproc_per_node N] CONFIG [key=value ...] [~key] [method=NAME]"

HELP = f"""usage: {USAGE}

Checks everything about a run that can be known without training, and prints it: keys, components, files, the model against its
folder, each row, steps, what will be written, and an estimate of the memory per rank. The arguments are those of `finch run`.
Nothing is written, no weights are loaded. The exit code is 1 if something is wrong.

--rows N    also prints the first N rows token by token, targets in «»
--exact     instead: memory, collectives and time of a step by running it on fake tensors; `finch check --exact --help`"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=0)


def main(parsed: argparse.Namespace, words: Sequence[str]) -> None:
    """Prints the report; ends the process with 1 if a problem was found, else 0.

    Raises:
        UserError: a mistake in the arguments.
    """
    if {"-h", "--help"} & set(words):
        print(HELP)
        return
    config, overrides, options = parse_arguments(words, USAGE)
    nodes, local_ranks = number_of_ranks(options)
    report = Report(config, overrides, nodes * local_ranks, parsed.rows, local_ranks)
    with only_errors_logged(), _collecting_rarely():  # the report says what a run would log
        report.run()
    number = report.num_problems
    print(f"\n{number} problem{'s' if number > 1 else ''} found" if number else "\nno problems found")
    sys.exit(1 if number else 0)


@contextlib.contextmanager
def _collecting_rarely() -> Iterator[None]:
    """What imports make stays: to look through it again and again takes the garbage collector a fifth of the command's time."""
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class Report:
    """The sections of a report. Each prints its lines and its problems; one that another's result is missing for is left out.

    Args:
        config: a path or the name of a config of finch.
        overrides: ``key=value`` and ``~key``.
        ranks: on all nodes.
        num_rows: training rows that are shown token by token.
        local_ranks: on this machine.

    Attributes:
        num_problems: printed so far.
    """

    def __init__(
        self, config: str, overrides: Sequence[str], ranks: int, num_rows: int = 0, local_ranks: int = 1
    ) -> None:
        self._config, self._overrides, self._ranks, self._num_rows = config, overrides, ranks, num_rows
        self._local_ranks = local_ranks
        self.num_problems = 0
        self._said: set[str] = set()
        self._title = ""
        self._mixture: Mixture | None = None
        self._trained: Samples | None = None
        self._refuse_replayed: Callable[[str, Any], None] = lambda key, rows: None
        self._fit: Callable[[Any, str, Any], str | None] = lambda tokenizer, key, stats: None

    def run(self) -> None:
        """Prints all sections."""
        from finch.data.row_files import validation_sets

        job = self._section("config", self._read_config)
        if job is None:
            return
        recipe, cfg = job
        model = self._section("model", lambda: self._check_model(recipe, cfg))
        tokenizer = self._section("tokenizer", lambda: self._build_tokenizer(cfg))
        samples = stats = steps = None
        if tokenizer is not None:
            found = self._section("dataset", lambda: self._check_rows(cfg, "dataset", tokenizer))
            samples, stats = found or (None, None)
            if samples is not None and cfg.self_replay is not None:
                self._section("self_replay", lambda: self._check_replayed(cfg, samples, tokenizer, model))
            for key, node in validation_sets(cfg.dataset_validation).values():
                self._section("validation", functools.partial(self._check_rows, {key: node}, key, tokenizer))
        else:
            self._print("rows not read, because of the problems above")
        for name in cfg.probes if isinstance(cfg.probes, Mapping) and tokenizer is not None else ():
            self._section("probes", functools.partial(self._check_probe, cfg, name, tokenizer, model))
        if samples is not None:
            steps = self._section("steps", lambda: self._count_steps(cfg, samples))
        if model is not None:
            self._section("output", lambda: self._list_output(recipe, cfg, model, stats, steps))
        if model is not None and samples is not None:
            self._section("memory", lambda: self._estimate_memory(cfg, model, samples, stats))

    def _read_config(self) -> tuple[str, DictConfig]:
        recipe, cfg = read_job(self._config, self._overrides, self._problem, self._ranks)
        self._print(f"{self._config}: {recipe} on {self._ranks} rank{'s' if self._ranks > 1 else ''}")
        for key in ("lr_scheduler", "loss", "regularizer", "kl_penalty", "optimizer"):
            if (cfg.get(key) is not None or key == "lr_scheduler") and not self.num_problems:
                self._print(f"{key} {component_of(cfg[key]) or 'none, a constant rate'}" + _rates(cfg, key))
        rate = cfg.optimizer.get("lr")
        if "adam" in str(component_of(cfg.optimizer)).lower() and isinstance(rate, float | int) and rate > _HIGH_RATE:
            self._print(
                f"warning: optimizer.lr={rate:g}: Adam moves each weight by about that much in a step; fine-tuning takes 1e-6 to 1e-3"
            )
        checks: list[Callable[[], Any]] = [*config_checks(cfg, self._ranks)]
        is_wrong = self.num_problems > 0
        with self._as_problem(is_wrong):
            checks += (lambda: self._check_gpus(cfg), *machine_checks(recipe, cfg, self._ranks))
        for one in checks:
            with self._as_problem(is_wrong):
                if isinstance(warning := one(), str):
                    self._print(f"warning: lr_scheduler: {warning}")
        return recipe, cfg

    def _check_gpus(self, cfg: DictConfig) -> None:
        import torch

        if device_of(cfg).type == "cuda" and self._local_ranks > (number := torch.cuda.device_count()):
            raise UserError(
                f"--nproc_per_node {self._local_ranks}: this machine has {number} GPU{'s' * (number != 1)}; start at most that many"
            )

    def _check_model(self, recipe: str, cfg: DictConfig) -> Any:
        from finch.models.hf_config import check_folder, read_config

        model = build_model(recipe, cfg)
        decoder, base, self._fit = model.decoder, model.base, model.check_rows
        number = sum(parameter.numel() for parameter in decoder.parameters())
        trained = sum(parameter.numel() for parameter in decoder.parameters() if parameter.requires_grad)
        self._print(f"{cfg.model['_component_']}: {number:,} parameters, {_share(trained, number)} trained")
        folder = check_folder(base.folder)
        with contextlib.suppress(UserError):
            config = read_config(folder)
            self._print(f"fits {folder}: {config.get('model_type')}, {len(base.files)} weight file(s)")
        return decoder

    def _build_tokenizer(self, cfg: DictConfig) -> Any:
        from finch.config.instantiate import build
        from finch.data.prompts import context_limit

        tokenizer = build(cfg.tokenizer, "tokenizer")
        limit = context_limit(None, tokenizer)
        size = getattr(tokenizer, "vocab_size", None)
        self._print(f"{cfg.tokenizer['_component_']}: {size or '?'} tokens; max_seq_len {limit or 'not limited'}")
        if getattr(tokenizer, "date", None) is not None:
            self._print(f"the chat template writes the date, {tokenizer.date}; a run keeps that of its first start")
        if problem := getattr(tokenizer, "prompt_problem", None):
            self._print(f"warning: {problem}")
        return tokenizer

    def _check_rows(self, cfg: Any, key: str, tokenizer: Any) -> tuple[Any, DatasetStats]:
        from finch.data import stats as statistics
        from finch.data.dataset import load_dataset
        from finch.data.mixture import mix

        limit = getattr(tokenizer, "max_seq_len", None)
        samples = load_dataset(cfg, key, tokenizer)
        if key == "dataset":
            self._mixture = mix(cfg, samples, cfg.seed or 0)
        stats = statistics.collect_stats(samples, 0, 1, limit)
        if key == "dataset":
            self._trained = samples
        node: Any = cfg[key]
        packs = f" in {len(samples):,} packs" if samples.packed else ""
        kind = f"format {node['format']}, " if isinstance(node, Mapping) and node.get("format") else ""
        self._print(f"{samples.source}: {kind}{stats.num_rows + stats.num_bad:,} rows{packs}")
        if stats.num_rows:
            median = stats.lengths[(stats.num_rows - 1) // 2]  # of an even number of rows the lower one
            self._print(
                f"tokens per row: {stats.lengths[0]} to {stats.max_length}, median {median}; "
                f"{sum(stats.lengths):,} tokens, {_share(stats.num_targets, sum(stats.lengths))} targets"
            )
        if key != "dataset" and self._trained and (known := statistics.describe_trained(samples, self._trained)):
            self._print(known)
        for note in stats.notes(limit):
            self._print(note)
        with self._as_problem(False):
            if warning := self._fit(tokenizer, key, stats):
                self._print(f"warning: {warning.removeprefix(f'{key}: ')}")
        if unused := statistics.describe_unused(samples):
            self._print(f"fields that training does not use: {unused}")
        if not stats.bad:
            self._refuse_replayed(key, samples)
        for problem in stats.bad_rows(key):
            self._problem(problem)
        if key == "dataset" and not stats.bad and len(samples):
            self._print(f"first row, its targets in «»: {rendered(samples[samples.rows[0]], tokenizer)}")
            tokenized = getattr(samples.parts[0][0], "tokenized", None)  # of the first file or data set of rows
            most = samples.rows[0] if tokenized is None else tokenized.most_answers()
            if most != samples.rows[0]:
                self._print(f"{samples.row(most)}, with most turns: {rendered(samples[most], tokenizer)}")
            for index in samples.rows[: self._num_rows]:
                print(f"{'':<12}{printable(f'{samples.row(index)}: {token_by_token(samples[index], tokenizer)}')}")
        if not stats.num_targets and not stats.num_bad:
            self._problem(f"{key}: no row has a target token; raise tokenizer.max_seq_len={limit}")
        return samples, stats

    def _check_replayed(self, cfg: DictConfig, samples: Any, tokenizer: Any, model: Any) -> None:
        from finch.config.schema import SelfReplay
        from finch.training.self_replay import read_prompts, refuse_replayed

        settings = SelfReplay.of(cfg.self_replay)
        assert settings is not None
        prompts = read_prompts(settings, samples, getattr(model, "max_seq_len", None), tokenizer)
        self._refuse_replayed = functools.partial(refuse_replayed, settings, prompts)
        source = "the model's own prompts" if settings.prompts == "self" else settings.prompts
        self._print(f"{source}, {len(prompts.tokens):,} rows, answers of up to {settings.max_new_tokens} tokens")

    def _check_probe(self, cfg: DictConfig, name: str, tokenizer: Any, model: Any) -> None:
        from finch.probes.kinds import read_rows
        from finch.probes.probes import read_probes

        settings = read_probes(cfg)[name]
        rows = read_rows(name, settings, tokenizer, getattr(model, "max_seq_len", None))
        if rows.kind == "self":
            self._refuse_replayed(f"probes.{name}", rows.samples)
        tokens = sum(len(sample["tokens"]) for sample in rows.samples)
        number = len(rows.questions or rows.samples)
        self._print(
            f"{name}: {settings.data_files or settings.source or 'built-in prompts'}, {rows.kind}, {number:,} rows, {tokens:,} tokens"
        )

    def _count_steps(self, cfg: DictConfig, samples: Any) -> int:
        from finch.data.order import GlobalOrder
        from finch.training.config_checks import check_replay

        num_samples = len(samples)
        if self._mixture is not None:
            num_samples = self._mixture.num_samples
            self._print(self._mixture.describe([source for _, source in samples.parts]))
        order = GlobalOrder.of(cfg, num_samples, max(1, self._ranks // cfg.tensor_parallel_dim))
        order.check()
        an_epoch = min(order.steps_per_epoch, cfg.max_steps_per_epoch or order.steps_per_epoch)
        steps = an_epoch * cfg.epochs
        self._print(
            f"{order.global_batch} samples a step ({cfg.batch_size} x {cfg.gradient_accumulation_steps} x "
            f"{order.ranks} ranks), {an_epoch:,} steps an epoch, {cfg.epochs} epochs: {steps:,} steps"
        )
        check_replay(cfg, steps)
        return steps

    def _list_output(
        self, recipe: str, cfg: DictConfig, decoder: Any, stats: DatasetStats | None, steps: int | None
    ) -> None:
        from finch.training.optimizer import uses_dataset_init
        from finch.training.run import check_disk_room, disk_use

        run = Path(cfg.output_dir)
        there = existing_part(run)
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            reason = os.strerror(errno.EACCES if there.is_dir() else errno.ENOTDIR)
            self._problem(f"output_dir={run} cannot be written ({reason}); give another folder")
        free = shutil.disk_usage(there).free
        self._print(f"{run.absolute()}, {gigabytes(free)} free")
        adapter_only = bool(cfg.get("save_adapter_weights_only", False))
        use = disk_use(cfg, decoder)
        name = "epoch_N_adapter/" if adapter_only else "epoch_N/"
        if recipe == LORA_RECIPE and not adapter_only:
            name = "epoch_N/ and epoch_N_adapter/"
        number = "the last epoch alone" if cfg.save_last_epoch_only else f"{cfg.epochs} epochs"
        number = "the best epoch alone" if use.num_replaced else number
        self._print(f"{name}: {gigabytes(use.epoch)} an epoch, {number}: {gigabytes(use.exports)}")
        self._print(
            f"checkpoints/step_N/: {gigabytes(use.state)} each, at most {use.num_states + 1} while one is written"
        )
        if uses_dataset_init(cfg) and stats is not None:
            self._print(f"pretrained.safetensors: {gigabytes(4 * stats.num_targets)}")
        if steps is not None:
            self._print(f"metrics.jsonl: {steps:,} lines")
        if use.total > free:
            self._print(f"the complete run needs about {gigabytes(use.total)}, more than is free")
        if missing := missing_after_training():
            self._print(missing)
        check_disk_room(cfg, decoder)

    def _estimate_memory(self, cfg: DictConfig, decoder: Any, samples: Any, stats: DatasetStats | None) -> None:
        from finch.plan.estimate.formula import HOST_PARTS, longest_row, memory_by_formula

        if stats is None or not stats.num_rows:
            return
        rows = longest_row(samples, stats)
        parts = dict(memory_by_formula(decoder, cfg, rows, ranks=self._ranks))
        peak = parts.pop("peak")
        shards = max(1, self._ranks // cfg.data_parallel_replicate_dim)
        self._print(
            f"an estimate per rank on {device_of(cfg).type}, for {cfg.batch_size} rows of {rows.seq} tokens, {cfg.dtype}"
            + (f", weights divided over {shards} ranks" if shards > 1 else "")
            + ", by a formula; `finch check --exact` takes longer and is closer"
        )
        for part, size in parts.items():
            if size >= peak / 10_000:
                where = " (host)" if cfg.fsdp_cpu_offload and part in HOST_PARTS else ""
                self._print(f"  {part + where:<32}{gigabytes(size):>10}")
        self._print(f"  {'peak':<32}{gigabytes(peak):>10}")

    def _section(self, title: str, section: Callable[[], Any]) -> Any:
        """The section's result; None if it ended with a problem."""
        self._title = title
        has_problems = self.num_problems > 0
        with self._as_problem(has_problems):
            return section()
        return None

    @contextlib.contextmanager
    def _as_problem(self, is_follow_up: bool) -> Iterator[None]:
        """Prints a UserError; ``is_follow_up``: also any other exception, since another problem may be its cause."""
        try:
            yield
        except UserError as error:
            self._problem(error)
        except Exception as error:
            if not is_follow_up:
                raise
            self._print(f"not checked, because of the problems above ({type(error).__name__})")

    def _print(self, text: str) -> None:
        print(f"{self._title:<12}{one_line(text)}")
        self._title = ""

    def _problem(self, error: object) -> None:
        """Once: several sections build the same component."""
        if str(error) not in self._said:
            self._said.add(str(error))
            self.num_problems += 1
            self._print(f"problem: {error}")


def _rates(cfg: DictConfig, key: str) -> str:
    if key == "optimizer":
        return f", lr {format_value(cfg.optimizer.get('lr'))}"
    from finch.training.config_checks import describe_cap

    cap, below = (cfg[key] or {}).get("eta_max"), ""
    with contextlib.suppress(UserError):  # a problem that the checks name
        below = describe_cap(cfg) if key == "lr_scheduler" else ""
    return ("" if cap is None else f", eta_max {format_value(cap)}") + (f", at its cap {below}" if below else "")


def _share(part: int, total: int) -> str:
    return "all" if part == total else f"{part:,} ({part / total:.1%})"


def _decoder(tokenizer: Any) -> Callable[[Iterable[int]], str]:
    """Decodes all tokens, special ones as well; line breaks as ⏎."""
    options = {"skip_special_tokens": False, "truncate_at_eos": False}
    known = inspect.signature(tokenizer.decode).parameters
    options = {name: value for name, value in options.items() if name in known}
    return lambda tokens: tokenizer.decode([int(token) for token in tokens], **options).replace("\n", "⏎")


def token_by_token(sample: Mapping[str, Any], tokenizer: Any) -> str:
    """A row's tokens, each with its id and those that are targets in «»."""
    decode, shown = _decoder(tokenizer), []
    for token, label in zip(sample["tokens"], sample["labels"], strict=True):
        text = f"{decode([token])} {int(token)}"
        shown.append(f"«{text}»" if label != IGNORE_INDEX else text)
    return f"{len(shown)} tokens: " + " | ".join(shown)


def rendered(sample: Mapping[str, Any], tokenizer: Any) -> str:
    """A row as the model reads it, with its targets in «», line breaks as ⏎, and the middle of a long part left out."""
    decode, parts = _decoder(tokenizer), []
    pairs = zip(sample["tokens"], sample["labels"], strict=True)
    for is_target, part in itertools.groupby(pairs, key=lambda pair: pair[1] != IGNORE_INDEX):
        text = decode(token for token, _ in part)
        text = text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]} ... {text[-_MAX_SHOWN // 2 :]}"
        parts.append(f"«{text}»" if is_target else text)
    return "".join(parts)
