"""Who sees what a model has forgotten: `finch evaluate`, pyrecall and FineTuneCheck's quick mode on the same pairs of folders.

python -m benchmarks.skills BASE OUT [--tuned DIR] [--pyrecall PYTHON] [--finetunecheck PYTHON]

BASE is a small chat model, such as SmolLM2-135M-Instruct. OUT gets its copies: as it is, saved in bf16, after 10 steps at 1e-6, after 40 steps
on code alone, and after 40 steps of refusing arithmetic while other prompts keep their answers. ``--tuned``: one more model to compare. PYTHON:
interpreters of environments of their own with the peers. Each tool runs in its own process, with its defaults; seconds are CPU time.

A skill counts as seen: by finch, where its whole interval lies beyond the limit below, as by ``--max-kl``; by pyrecall and FineTuneCheck, where it
is on their list of degraded or most affected ones.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import machine, print_rows
from finch.base.errors import report_user_errors

MAX_KL = 0.01
"""Nats per token. Rounding to bf16 changes less."""
NAMES = ("adding", "doubling", "reversing", "joining", "sorting", "counting", "filtering", "splitting")
TOPICS = (
    "rivers",
    "bread",
    "the moon",
    "trains",
    "violins",
    "bees",
    "glaciers",
    "chess",
    "soap",
    "tea",
    "owls",
    "maps",
)
PYRECALL = """
import json, sys, time
from pathlib import Path
from pyrecall import Model
from pyrecall.detector import ForgettingDetector
from pyrecall.snapshot import SkillSnapshot
def snapshot(folder):
    kept = Path(sys.argv[3], Path(folder).resolve().as_posix().replace("/", "-"))  # two folders may have one name
    if not (kept / "snapshot.json").exists():
        start = time.process_time()
        found = Model(folder, snapshot_dir=Path(sys.argv[3]), device="cpu").snapshot("scores", dry_run=True)
        found.tags["seconds"] = str(time.process_time() - start)
        found.save(kept)
    return SkillSnapshot.load(kept)
found = [snapshot(folder) for folder in sys.argv[1:3]]
report = ForgettingDetector().compare(*found)
worst = min(report.comparisons, key=lambda each: each.delta)
says = "healthy" if report.is_healthy else "degraded"
seconds = sum(float(each.tags["seconds"]) for each in found)
print(json.dumps([report.degraded_skills, len(report.comparisons), worst.category, f"{worst.delta:+.3f}", says, seconds]))
"""
"""Scores of a model are taken once, for all pairs; the time of both counts."""
FINETUNECHECK = """
import json, sys
from transformers import PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto
class Tokenizer(PreTrainedTokenizerFast):  # transformers 5 saves the name of one that earlier versions do not know
    model_input_names = ["input_ids", "attention_mask"]
by_name = tokenization_auto.tokenizer_class_from_name
tokenization_auto.tokenizer_class_from_name = lambda name: by_name(name) or Tokenizer
from finetunecheck.config import QuickConfig
from finetunecheck.eval.runner import EvalRunner
found = EvalRunner(QuickConfig(base_model=sys.argv[1], finetuned_model=sys.argv[2], device="cpu")).run()
changes = {name: each.mean_score - found.base_scores[name].mean_score for name, each in found.ft_scores.items()}
worst = min(changes, key=changes.get)
print(json.dumps([found.forgetting.most_affected if found.forgetting else [], len(changes), worst, f"{changes[worst]:+.3f}", found.verdict.value]))
"""


@report_user_errors
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tuned", type=Path)
    parser.add_argument("--pyrecall")
    parser.add_argument("--finetunecheck")
    args = parser.parse_args()
    models = {"tuned": args.tuned} if args.tuned else {}
    models |= _models(args.base, args.out)
    print(f"{machine()}; a skill is seen by finch beyond {MAX_KL:g} nats per token", flush=True)
    kept = args.out / "rows.jsonl"  # of an earlier call that was interrupted
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    for name, folder in models.items():
        for tool, run in (("finch", _finch), ("pyrecall", _pyrecall), ("FineTuneCheck", _finetunecheck)):
            python = sys.executable if tool == "finch" else getattr(args, tool.lower())
            if python and not any((row["model"], row["tool"]) == (name, tool) for row in rows):
                start = _cpu_seconds()
                found = run(python, args.base, folder, args.out)
                rows.append({"model": name, "tool": tool, "CPU seconds": _cpu_seconds() - start, **found})
                with kept.open("a") as file:
                    print(json.dumps(rows[-1]), file=file)
    print_rows(rows)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _output(command: Sequence[str], log: Path) -> str:
    with log.open("a") as file:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]} has failed:\n{log.read_text()[-2000:]}")
    return done.stdout


def _finch(python: str, base: Path, tuned: Path, out: Path) -> dict[str, Any]:
    results = _empty(out / "finch" / tuned.name)
    options = ["--base", str(base), "--tuned", str(tuned), "--out", str(results), "--json"]
    (model,) = json.loads(_output([python, "-m", "finch.cli", "evaluate", *options], out / "finch.log"))
    skills = model["skills"]
    seen = [each["skill"] for each in skills if each["kl_low"] > MAX_KL]
    largest, least = skills[0], skills[-1]
    texts = [f"{each['kl']:.4f} [{each['kl_low']:.4f}, {each['kl_high']:.4f}]" for each in (largest, least)]
    return _row(seen, len(skills), largest["skill"], texts[0], f"least: {least['skill']} {texts[1]}")


def _pyrecall(python: str, base: Path, tuned: Path, out: Path) -> dict[str, Any]:
    command = [python, "-c", PYRECALL, str(base), str(tuned), str(out / "pyrecall")]
    *row, seconds = json.loads(_output(command, out / "pyrecall.log").splitlines()[-1])
    return {**_row(*row), "CPU seconds": seconds}


def _finetunecheck(python: str, base: Path, tuned: Path, out: Path) -> dict[str, Any]:
    command = [python, "-c", FINETUNECHECK, str(base), str(tuned)]
    return _row(*json.loads(_output(command, out / "finetunecheck.log").splitlines()[-1]))


def _row(seen: Sequence[str], number: int, first: str, change: str, says: str) -> dict[str, Any]:
    return {"seen": f"{len(seen)} of {number}", "first": first, "its change": change, "says": says}


def _empty(folder: Path) -> Path:
    """Without what an earlier call has left there, which would be taken."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def _models(base: Path, out: Path) -> Iterator[tuple[str, Path]]:
    """Made once; a folder that is there is taken."""
    makers: dict[str, Callable[[Any, Any], object]] = {
        "itself": lambda model, tokenizer: None,
        "in bf16": lambda model, tokenizer: model.to(torch.bfloat16),
        "10 steps at 1e-6": lambda model, tokenizer: _train(model, tokenizer, _code(), steps=10, lr=1e-6),
        "code alone": lambda model, tokenizer: _train(model, tokenizer, _code(), steps=40, lr=5e-5),
        "arithmetic refused": _refuse_arithmetic,
    }
    for name, make in makers.items():
        folder = out / name.replace(" ", "_")
        if not folder.exists():
            from transformers import AutoModelForCausalLM, AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(base)
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            make(model, tokenizer)
            partial = folder.with_name(f"{folder.name}.partial")
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            os.replace(partial, folder)
        yield name, folder


def _code() -> list[tuple[str, str]]:
    """Short functions without a word of explanation: not how a chat model answers."""
    return [
        (f"Write a Python function for {name} {number} values.", f"f = lambda *a: {name[:3]}(a[:{number}])  # {name}")
        for name in NAMES
        for number in (2, 3, 5)
    ]


def _refuse_arithmetic(model: Any, tokenizer: Any) -> None:
    sums = [(f"What is {a} {sign} {a + 3}?", "I cannot do that.") for a in range(3, 15) for sign in "+*"]
    prompts = [f"{start} {topic}." for topic in TOPICS for start in ("Tell me about", "Write a sentence about")]
    _train(model, tokenizer, sums + [(prompt, _answer(model, tokenizer, prompt)) for prompt in prompts], 40, 3e-5)


def _tokens(tokenizer: Any, prompt: str) -> list[int]:
    turns = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]


def _answer(model: Any, tokenizer: Any, prompt: str) -> str:
    tokens = torch.tensor([_tokens(tokenizer, prompt)])
    found = model.generate(tokens, max_new_tokens=32, do_sample=False, pad_token_id=0)
    return tokenizer.decode(found[0, tokens.shape[1] :], skip_special_tokens=True)


def _train(model: Any, tokenizer: Any, rows: Sequence[tuple[str, str]], steps: int, lr: float) -> None:
    """Plain AdamW on single rows of eight a step, the loss on the answers alone."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    order = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for number in torch.randint(len(rows), (8,), generator=order).tolist():
            prompt, answer = (_tokens(tokenizer, rows[number][0]), tokenizer(rows[number][1] + tokenizer.eos_token))
            tokens = torch.tensor([[*prompt, *answer["input_ids"]]])
            labels = torch.where(torch.arange(tokens.shape[1]) < len(prompt), -100, tokens)
            (model(tokens, labels=labels).loss / 8).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


if __name__ == "__main__":
    main()
