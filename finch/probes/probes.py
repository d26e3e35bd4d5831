"""The probes of a run: keys checked and rows read before weights are loaded, evaluated with the pretrained weights, then while the model learns."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from finch.base.errors import UserError
from finch.base.log import logger
from finch.config.instantiate import did_you_mean, locate
from finch.config.schema import Budget, Probe
from finch.data.prompts import Prompts, stop_tokens, user_prompt
from finch.data.row_files import validation_sets
from finch.data.skills import skill_rows
from finch.data.training_data import TrainingData
from finch.distributed import watchdog
from finch.distributed.precision import precision_of
from finch.models.chat_tokenizer import ChatTokenizer
from finch.objectives import DFT, STM, TALR
from finch.objectives.divergence import scale
from finch.objectives.replay import uniform_draws
from finch.probes.evaluation import evaluate
from finch.probes.kinds import ProbeRows, read_rows
from finch.training.checkpointer import TrainState
from finch.training.hooks import Hook, Trainer
from finch.training.own_answers import OwnAnswers, generate
from finch.training.reference import model_settings

KIND_WITH = {"accuracy": "multiple_choice", "kl": "self"}
"""The kind of probe that a metric needs; all kinds have a loss."""
SECONDS = "probe_seconds"
_SHOWN = ("knowledge", "mathematics", "instructions")
"""Skills whose first question both models answer at the end of a run."""
_SHOWN_TOKENS, _SHOWN_CHARACTERS = 24, 70
_NUM_ROWS_FOR_MEAN = 256
MAX_SHARE = 0.04
"""Share of the time for all evaluations of an epoch; the estimate may be wrong by a fifth before they take 5%."""
MAX_PER_EPOCH = 10
FORWARD_COST = 0.5
"""Cost of a token in an evaluation, relative to one in training: a third by the count of operations, more with what each pass costs by itself."""


def read_probes(cfg: DictConfig) -> dict[str, Probe]:
    """The settings of each probe by name; empty without probes."""
    blocks: Any = {} if cfg.probes is None else OmegaConf.to_container(cfg.probes, resolve=True)
    return {name: Probe(**block) for name, block in blocks.items()}


def own_answers(name: str, rows: ProbeRows, settings: Probe, folder: Path, tokenizer: Any) -> OwnAnswers:
    """The pretrained model's answers to the prompts of the probe ``name``, of kind self, with their file in ``folder``."""
    return OwnAnswers(
        f"probes.{name}",
        folder / f"own_answers_{name}.safetensors",
        Prompts([sample["tokens"] for sample in rows.samples]),
        stop_tokens=stop_tokens(tokenizer),
        max_new_tokens=settings.max_new_tokens,
        top_k=settings.top_k,
    )


def check_probes(cfg: DictConfig) -> None:
    """Checks what can be known of probes, budget and ``select_by`` without reading rows. Raises UserError for a probe without rows, a name
    that a validation set has as well, a budget or a selection that refers to nothing."""
    probes, validations = read_probes(cfg), validation_sets(cfg.dataset_validation)
    for name, probe in probes.items():
        if probe.source is None and probe.data_files is None and probe.kind != "self":
            raise UserError(
                f"probes.{name} has no rows: set probes.{name}.data_files to a file, or probes.{name}.source to a name on the hub"
            )
        if f"validation/{name}/loss" in validations:
            raise UserError(f"probes.{name} and dataset_validation.{name} have the same name; rename one")
    budget = Budget.of(cfg.forgetting_budget)
    if budget is not None:
        if budget.probe not in probes:
            raise UserError(f"forgetting_budget.probe={budget.probe}: {_no_probe(budget.probe, probes)}")
        if budget.metric != "loss" and probes[budget.probe].kind != KIND_WITH["kl"]:
            raise UserError(
                f"forgetting_budget.metric={budget.metric} needs a probe of kind self, and probes.{budget.probe}.kind={probes[budget.probe].kind}; set metric=loss"
            )
    if cfg.probes_every_n_steps is not None and not probes:
        raise UserError(f"probes_every_n_steps={cfg.probes_every_n_steps} needs probes; there are none: set it to null")
    if cfg.early_stopping is not None:
        text = f"early_stopping.patience={cfg.early_stopping.patience}"
        if not validations and cfg.select_by is None:
            raise UserError(
                f"{text} needs a validation loss, or another metric in select_by: set dataset_validation, or early_stopping=null"
            )
        if cfg.save_last_epoch_only:
            raise UserError(f"{text} excludes save_last_epoch_only=True, which does not keep the best model; set one")
    if cfg.select_by is not None:
        _check_selection(cfg.select_by, probes, validations)


def selection_key(cfg: DictConfig, kinds: dict[str, str]) -> str | None:
    """The metric that the best epoch is chosen by; None: there is none to choose by. Raises UserError if ``select_by`` names a metric that
    the probe's kind does not have."""
    if cfg.select_by is not None:
        source, *rest = cfg.select_by.split("/")
        if source == "probe":
            name, metric = rest[:2]
            if kinds[name] != KIND_WITH.get(metric, kinds[name]):
                raise UserError(
                    f"select_by={cfg.select_by}: probes.{name} is of kind {kinds[name]}, which has no {metric}; use probe/{name}/loss"
                )
        return str(cfg.select_by)
    validation = next(iter(validation_sets(cfg.dataset_validation)), None)
    loss = locate(cfg.loss["_component_"], "loss")
    if loss not in (DFT, STM, TALR):
        return validation
    task = next((name for name, probe in read_probes(cfg).items() if probe.task), None)
    if task is not None:
        return f"probe/{task}/" + ("accuracy" if kinds[task] == KIND_WITH["accuracy"] else "loss")
    if validation is not None and not cfg.save_last_epoch_only:
        logger.warning(
            f"RUN/best is chosen by {validation}, a raw cross-entropy, which picks the least trained epoch with {loss.__name__}: mark a probe of the "
            "task with probes.NAME.task=True, or set select_by"
        )
    return validation


def _check_selection(select_by: str, probes: dict[str, Probe], validations: Iterable[str]) -> None:
    kind, *rest = select_by.split("/")
    if kind != "probe":
        if select_by not in validations:
            known = ", ".join(validations) or "none, since there is no dataset_validation"
            raise UserError(f"select_by={select_by}: there is no such validation loss; known are {known}")
        return
    name, metric = rest[:2]
    if name not in probes:
        raise UserError(f"select_by={select_by}: {_no_probe(name, probes)}")
    needed = KIND_WITH.get(metric)
    if needed is not None and probes[name].kind not in ("auto", needed):
        raise UserError(
            f"select_by={select_by}: probes.{name}.kind={probes[name].kind} has no {metric}, which kind {needed} has; use probe/{name}/loss"
        )


def _no_probe(name: str, probes: Iterable[str]) -> str:
    names = list(probes)
    if not names:
        return "there are no probes; add one under probes"
    return f"there is no probe {name}{did_you_mean(name, names) or '; the probes are ' + ', '.join(names)}"


class Probes(Hook):
    """The probes of a run; without any, it only says which metric chooses the best epoch.

    The number of training rows decides how often probes are evaluated. Built before weights are loaded. Raises UserError for rows that
    cannot be used, or a metric that a probe does not have.
    """

    def __init__(self, trainer: Trainer) -> None:
        cfg, tokenizer, parallel, self._trainer = trainer.cfg, trainer.tokenizer, trainer.parallel, trainer
        max_seq_len = getattr(trainer.decoder, "max_seq_len", None)  # None: no limit
        self._cfg, self._parallel = cfg, parallel
        self._seconds = 0.0  # since this start, the pretrained model's answers included
        self._settings = read_probes(cfg)
        self._rows: dict[str, ProbeRows] = {
            name: read_rows(name, settings, tokenizer, max_seq_len) for name, settings in self._settings.items()
        }
        for name, rows in self._rows.items():
            if rows.kind == "self":
                trainer.loss.replay.refuse_prompts(f"probes.{name}", rows.samples)
        self._check_groups()
        kinds = {name: rows.kind for name, rows in self._rows.items()}
        # Now: answers change the rows of kind self. By their length they are others.
        self._digests = {
            name: f"{rows.digest} {self._settings[name].max_new_tokens}" if rows.kind == "self" else rows.digest
            for name, rows in self._rows.items()
        }
        self._eval = trainer.data.eval_settings
        self._answers = {
            name: own_answers(name, rows, self._settings[name], Path(cfg.output_dir), tokenizer)
            for name, rows in self._rows.items()
            if rows.kind == "self"
        }
        self._said: list[str] = []  # both models' answers, once the run has ended
        self._baselines: dict[str, dict[str, Any]] = {}
        self._intervals = self._choose_intervals(trainer.data) if self._rows else {}
        trainer.state.select_by = key = selection_key(cfg, kinds)
        if cfg.save_last_epoch_only and cfg.epochs > 1 and key is not None:
            logger.warning(
                f"save_last_epoch_only=True: RUN/best is the last epoch, not the one with the best {key.replace('_', ' ')}"
            )
        # Now, since it says what is to be measured with the pretrained weights.
        self.load_state_dict(trainer.run.scalars)

    def _check_groups(self) -> None:
        """Raises UserError for a budget or a selection by a group that the probe's rows do not have."""
        budget = Budget.of(self._cfg.forgetting_budget)
        for key, metric in (("select_by", self._cfg.select_by), ("forgetting_budget.metric", budget and budget.key)):
            source, name, measured, group = [*(metric or "").split("/"), "", "", ""][:4]
            if source != "probe" or not group:
                continue
            # The losses of own answers are not by group: the KL says more.
            known = self._rows[name].groups if measured == "kl" or self._rows[name].kind != "self" else []
            if group not in known:
                hint = did_you_mean(group, known) or f"; its groups are {', '.join(dict.fromkeys(known)) or 'none'}"
                raise UserError(f"{key}: probes.{name} has no {measured}/{group}{hint}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the values at step 0 of a checkpoint's scalars, of the probes whose rows are still the same."""
        for name, baseline in state.get("probes", {}).items():
            if baseline["digest"] == self._digests.get(name):
                self._baselines[name] = baseline

    def state_dict(self) -> dict[str, Any]:
        """The values at step 0: a resumed run no longer has the weights that they were measured with."""
        return {"probes": self._baselines}

    def needs_pretrained(self, trainer: Trainer) -> bool:
        """Reads the pretrained model's answers where an earlier start of the run has left them; a collective."""
        for name, answers in self._answers.items():
            if answers.load(trainer.base.files, model_settings(self._cfg), self._parallel):
                self._rows[name].samples = answers.samples
        has_answers = all(answers.samples for answers in self._answers.values())
        # A resumed run may have new probes or other rows: their values at step 0 need the pretrained weights.
        return not has_answers or self._baselines.keys() != self._rows.keys()

    def prepare(self, trainer: Trainer) -> None:
        """Generates answers and measures what is missing of step 0; a collective."""
        start = time.perf_counter()
        for name, answers in sorted(self._answers.items()):
            if not answers.samples:
                answers.generate(trainer.model, self._parallel, precision_of(self._cfg.dtype).compute, self._eval)
                self._rows[name].samples = answers.samples
        for name, rows in self._rows.items():
            if name not in self._baselines:
                metrics = evaluate(trainer.model, name, rows, self._eval)
                self._baselines[name] = {"digest": self._digests[name], "metrics": metrics}
        self._seconds += time.perf_counter() - start
        watchdog.heartbeat()

    def start(self, trainer: Trainer) -> None:
        # A resumed run's metrics have this line already.
        if not trainer.run.scalars:  # a new run
            metrics = {name: self._baselines[name]["metrics"] for name in self._rows}
            self._write(metrics, trainer.state, self._seconds)

    def wants_sync(self, step: int) -> bool:
        return any(step % interval == 0 for interval in self._intervals.values())

    def after_step(self, state: TrainState) -> None:
        # At an epoch's last step `after_epoch` evaluates all probes, those that are due included.
        if not state.is_epoch_end:
            self._evaluate(state, [name for name, interval in self._intervals.items() if state.step % interval == 0])

    def after_epoch(self, state: TrainState) -> Mapping[str, float]:
        measured = {key.split("/")[1] for key in state.evaluated if key.startswith("probe/")}
        self._evaluate(state, [name for name in self._rows if name not in measured])
        return state.evaluated

    def after_training(self, state: TrainState) -> None:
        """Lets the tuned model answer a few of finch's questions that the pretrained one has answered; a collective."""
        for answers in list(self._answers.values())[:1]:
            tokenizer, length = self._trainer.tokenizer, min(answers.max_new_tokens, _SHOWN_TOKENS)
            asked = {row["skill"]: row["question"] for row in reversed(skill_rows()) if "question" in row}  # the first
            texts = {tuple(user_prompt(asked[skill], tokenizer)): asked[skill] for skill in _SHOWN}
            pairs = zip(map(tuple, answers.prompts.tokens), answers.samples, strict=True)
            before = {prompt: sample["tokens"][len(prompt) :] for prompt, sample in pairs if prompt in texts}
            if not before:
                continue  # the prompts are the user's
            place: dict[str, Any] = {"dtype": precision_of(self._cfg.dtype).compute, "parallel": self._parallel}
            draws = uniform_draws(len(before), length, 0)
            after = generate(
                self._trainer.model, list(before), draws, 0.0, answers.stop_tokens, max_new_tokens=length, **place
            )
            for (prompt, old), new in zip(before.items(), after, strict=True):
                said = (answer_text(tokens[:length], tokenizer) for tokens in (old, new["tokens"]))
                both = [textwrap.shorten(text, _SHOWN_CHARACTERS, placeholder=" ...") for text in said]
                self._said.append(f'{texts[prompt]} Pretrained: "{both[0]}" Tuned: "{both[1]}"')

    def summary(self, state: TrainState) -> list[str]:
        if not self._rows:
            return []
        share = self._seconds / (time.perf_counter() - self._trainer.run.start_time)
        kls = [state.evaluated[key] for name in self._answers if (key := f"probe/{name}/kl") in state.evaluated]
        return [
            *map(scale, kls[:1]),
            *self._said,
            f"probes took {self._seconds:.1f} s, {share:.1%} of the time since this start",
        ]

    def _evaluate(self, state: TrainState, due: Sequence[str]) -> None:
        """Evaluates the probes that are due, and writes their metrics; a collective."""
        if not due:
            return
        self._trainer.metrics_log.flush()  # the steps so far have their own time
        start = time.perf_counter()
        metrics = {name: evaluate(self._trainer.model, name, self._rows[name], self._eval) for name in due}
        seconds = time.perf_counter() - start
        self._seconds += seconds
        watchdog.heartbeat()
        state.evaluated |= self._write(metrics, state, seconds)

    def _write(self, metrics: Mapping[str, Mapping[str, float]], state: TrainState, seconds: float) -> dict[str, float]:
        if not metrics:
            return {}
        step, metrics_log = state.step, self._trainer.metrics_log
        line: dict[str, float] = {}
        for name, values in metrics.items():
            line |= {f"probe/{name}/{key}": value for key, value in values.items()}
            if step > 0:
                before = self._baselines[name]["metrics"]
                # A KL is its own change.
                changes = {key: value - before[key] for key, value in values.items() if not key.startswith("kl")}
                line |= {f"probe/{name}/{key}_change": value for key, value in changes.items()}
        metrics_log.write_event({"step": step, "epoch": state.epoch, **line, SECONDS: round(seconds, 3)})
        # The time of evaluations is not that of training steps.
        metrics_log.reset_timer()
        logger.info(
            f"step {step}: "
            + "; ".join(self._describe(name, values, is_start=step == 0) for name, values in metrics.items())
        )
        return line

    def _describe(self, name: str, values: Mapping[str, float], *, is_start: bool) -> str:
        parts = []
        for key in (key for key in ("loss", "accuracy", "kl") if key in values):
            change = "" if is_start or key == "kl" else f" ({values[key] - self._baselines[name]['metrics'][key]:+.4f})"
            parts.append(f"{key} {values[key]:.4f}{change}")
        return f"probe {name} " + ", ".join(parts)

    def _choose_intervals(self, data: TrainingData) -> dict[str, int]:
        """Steps between two evaluations of each probe; logged."""
        steps = data.steps_per_epoch
        indices = list(data.samples.rows[:_NUM_ROWS_FOR_MEAN])
        lengths = [len(torch.as_tensor(data.samples[index]["labels"])) for index in indices]
        step_tokens = data.order.global_batch * sum(lengths) / len(lengths)
        # Answers are not there yet: each is counted with its full length.
        tokens = {
            name: sum(len(sample["tokens"]) for sample in rows.samples)
            + (self._settings[name].max_new_tokens * len(rows.samples) if rows.kind == "self" else 0)
            for name, rows in self._rows.items()
        }
        interval = self._cfg.probes_every_n_steps or default_interval(sum(tokens.values()), step_tokens, steps)
        intervals = {name: settings.every_n_steps or interval for name, settings in self._settings.items()}
        cost = sum(eval_cost(tokens[name], step_tokens) * (1 + (steps - 1) // each) for name, each in intervals.items())
        for name, each in intervals.items():
            when = f"every {each} steps and " if each < steps else ""
            logger.info(
                f"probes.{name}: {self._rows[name].kind}, {len(self._rows[name].questions or self._rows[name].samples)} rows, evaluated at step 0, {when}at the "
                "ends of epochs"
            )
        if cost > 0.05 * steps:
            logger.info(
                f"probes will take about {cost / (steps + cost):.0%} of an epoch's time, estimated by tokens; fewer rows (probes.NAME.rows) or evaluations "
                "(probes_every_n_steps) take less"
            )
        return intervals


def answer_text(tokens: Iterable[int], tokenizer: Any) -> str:
    """The text of an answer's tokens, without those that end it and those that only the model has."""
    ends = stop_tokens(tokenizer)
    known = math.inf if isinstance(tokenizer, ChatTokenizer) else getattr(tokenizer, "vocab_size", math.inf)
    return str(tokenizer.decode([token for token in tokens if token not in ends and token < known]).strip())


def default_interval(eval_tokens: int, step_tokens: float, steps_per_epoch: int) -> int:
    """Steps between two evaluations, so that those of an epoch take less than 5% of its time; at most ten per epoch, at least one at its end.

    They follow from config and rows: a resumed run, or one on another machine, has the same steps. ``eval_tokens``: of one evaluation;
    ``step_tokens``: of an optimizer step, over all ranks.
    """
    affordable = math.floor(MAX_SHARE * steps_per_epoch / eval_cost(eval_tokens, step_tokens))
    return math.ceil(steps_per_epoch / min(max(affordable, 1), MAX_PER_EPOCH))


def eval_cost(eval_tokens: int, step_tokens: float) -> float:
    """The time of an evaluation in optimizer steps, estimated."""
    return FORWARD_COST * max(eval_tokens, 1) / max(step_tokens, 1.0)
