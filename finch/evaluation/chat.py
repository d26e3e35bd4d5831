"""`finch chat`: the answers of a run's model and of its pretrained one to the same prompt, side by side."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from finch.base import hub
from finch.base.errors import UserError
from finch.base.log import printable
from finch.base.run_files import AVERAGE, CONFIG, HF_CONFIG
from finch.config.instantiate import build
from finch.data.prompts import context_limit, stop_tokens, user_prompt
from finch.distributed import parallel as distributed
from finch.distributed.parallel import Parallel
from finch.distributed.precision import precision_of
from finch.evaluation.adapters import merge_folder
from finch.evaluation.average import UNUSED, read_config, tuned_folder, without_lora
from finch.evaluation.model_folders import check_pretrained, has_average
from finch.objectives.replay import uniform_draws
from finch.probes.probes import answer_text
from finch.training.chunked_loss import TokenLoss
from finch.training.loaded_model import LoadedModel
from finch.training.own_answers import generate
from finch.weights.files import ADAPTER_CONFIG, check_export
from finch.weights.formats import open_checkpoint
from finch.weights.huggingface import HuggingFaceFolder

CLEAR = "/clear"
_UNUSED = (*UNUSED, "dataset", "dataset_validation", "collate_fn", "loss", "probes", "forgetting_budget", "select_by")


class Chat:
    """Both models of a run in memory, in the run's dtype (bf16 for bf16_mixed); an adapter is merged.

    Args:
        run: its folder, whose average is taken where it has one, or a model's within: ``within_budget``, an epoch's.
        base: the pretrained folder, where it has moved; None: that of RUN/config.yaml.
        temperature: 0: the likeliest token.
        trust, verify: see :func:`finch.evaluation.average.average`.

    Attributes:
        tuned: the name of the tuned model in its run.

    Raises UserError for a folder that is no run with a model, or whose pretrained folder is gone.
    """

    def __init__(
        self,
        run: Path,
        base: Path | None,
        *,
        max_new_tokens: int,
        temperature: float,
        trust: bool = False,
        verify: bool = False,
    ) -> None:
        if (run / CONFIG).is_file() and has_average(run):
            run /= AVERAGE
        own = run / "model" if (run / "model").is_dir() else run  # of RUN/average
        is_model = not (run / CONFIG).is_file() and any((own / name).is_file() for name in (HF_CONFIG, ADAPTER_CONFIG))
        trained = run.resolve().parent if is_model else run
        cfg = read_config(trained, base, _UNUSED, trust=trust)
        pretrained = Path(cfg.checkpointer.checkpoint_dir)
        if not pretrained.is_dir():
            raise UserError(
                f"{pretrained}, which {run} was trained from, is no folder; give the one it has moved to with --base {hub.origin(pretrained) or 'DIR'}"
            )
        changes = {"dtype": "bf16", "fsdp_cpu_offload": False} if precision_of(cfg.dtype).is_mixed else {}
        self._cfg = DictConfig(OmegaConf.merge(without_lora(cfg), changes))
        if not trust:
            check_pretrained(trained, pretrained, open_checkpoint(cfg.checkpointer).files)
        self._max_new_tokens, self._temperature = max_new_tokens, temperature
        self._place = Parallel(distributed.local_device(cfg.device))
        self._tokenizer = build(cfg.tokenizer, "tokenizer")
        folder = own if is_model else tuned_folder(run)
        self.tuned = (run.resolve() if is_model else folder).name
        for each in (folder, pretrained):
            check_export(each, by_digest=verify)
        with tempfile.TemporaryDirectory(prefix="finch_chat_") as merged:
            if not (folder / HF_CONFIG).is_file():
                merge_folder(pretrained, folder, Path(merged) / "model")
                folder = Path(merged) / "model"
            self._models = [self._load(each) for each in (pretrained, folder)]
        self._limit = context_limit(getattr(self._models[0].decoder, "max_seq_len", None), self._tokenizer)

    def answers(self, prompt: str, before: Sequence[Sequence[str]] = ((), ())) -> list[str]:
        """The pretrained and the tuned model's; ``before``: of each the prompts and answers before. Raises UserError for one that leaves no room."""
        prompts = [user_prompt(prompt, self._tokenizer, turns) for turns in before]
        length = max(map(len, prompts))
        room = self._max_new_tokens if self._limit is None else min(self._max_new_tokens, self._limit - length)
        if room < 1:
            raise UserError(
                f"the prompt has {length} tokens, the context {self._limit}; give a shorter one, or type {CLEAR}"
            )
        ends = stop_tokens(self._tokenizer)
        options: dict[str, Any] = {
            "max_new_tokens": room,
            "dtype": precision_of(self._cfg.dtype).compute,
            "parallel": self._place,
        }
        texts = []
        for model, tokens in zip(self._models, prompts, strict=True):
            [answer] = generate(model, [tokens], uniform_draws(1, room, 0), self._temperature, ends, **options)
            texts.append(answer_text(answer["tokens"], self._tokenizer))
        return texts

    def _load(self, folder: Path) -> TokenLoss:
        model = LoadedModel(self._cfg, precision_of(self._cfg.dtype)).in_memory(self._place)
        HuggingFaceFolder(str(folder)).load_into([model.decoder.state_dict(keep_vars=True)])
        return model.eval()


def talk(chat: Chat, prompt: str | None, console: Console) -> None:
    """Answers ``prompt``, or what is typed until an empty line or the end of the input: a conversation, which ``/clear`` starts anew."""
    before: tuple[list[str], list[str]] = ([], [])
    while prompt is None or prompt:
        text = prompt if prompt is not None else _typed(console)
        if not text:
            return
        if text == CLEAR:
            before = ([], [])
            continue
        try:
            with torch.no_grad():
                base, tuned = answers = chat.answers(text, before)
        except UserError as error:
            if prompt is not None:
                raise
            console.print(Text(printable(str(error))))
            continue
        for turns, answer in zip(before, answers, strict=True):
            turns += [text, answer]
        is_piped = prompt is None and not sys.stdin.isatty()  # nobody sees what was typed
        title = Text(printable(f"prompt> {text}")) if is_piped else None
        table = Table(
            "pretrained",
            Column(Text(printable(f"tuned ({chat.tuned})"))),  # a folder's name, which may have any signs
            expand=True,
            title=title,
            title_justify="left",
            title_style="bold",
        )
        table.add_row(Text(printable(base)), Text(printable(tuned)))
        console.print(table)
        if prompt is not None:
            return


def _typed(console: Console) -> str:
    try:
        return console.input("[bold]prompt>[/bold] " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""
