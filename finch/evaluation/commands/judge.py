"""`finch evaluate --judge`: asks a language model on a server with OpenAI's protocol."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
from collections.abc import Mapping
from pathlib import Path

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.base.log import logger
from finch.cli.arguments import positive
from finch.evaluation import judge as task
from finch.evaluation.chat_client import ChatClient, ChatRequest, RequestLog, count_calls, read_prompt

LOG = "language.requests"
"""In the base model's folder: every answer. Not .json, so that no reader takes it for a result."""
_NUMBERS = {
    "max-tokens-budget": (None, "tokens that all answers for one base model may take, earlier starts included"),
    "limit": (None, "only the first N documents"),
    "concurrency": (4, "calls at a time (default: 4)"),
    "timeout": (120, "of a call, in seconds (default: 120)"),
    "max-answer-tokens": (1024, "of a judgement, its reasons included (default: 1024)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    runs = "a tuned model's answers, made with `finch evaluate --suite language`: a run, or a folder of results"
    parser.add_argument("results", nargs="+", type=Path, metavar="RUN", help=runs)
    parser.add_argument("--model", required=True, metavar="NAME", help="its name on the server")
    for name, (default, text) in _NUMBERS.items():
        parser.add_argument(f"--{name}", type=positive(int), default=default, metavar="N", help=text)
    prompt = "the judge's system prompt in place of finch's; after a line ===== the user turn, with {instruction}, {first} and {second}"
    parser.add_argument("--prompt", type=Path, metavar="FILE", help=prompt)
    parser.add_argument("--dry-run", action="store_true", help="count documents, calls and tokens, and send nothing")
    parser.add_argument(
        "--control", action="store_true", help="judge the base model against itself: does it prefer a place?"
    )


def main(parsed: argparse.Namespace) -> None:
    """Judges, or continues an earlier start, and writes the scores of each result whose judgements are complete.

    Raises:
        UserError: answers that are missing or of different prompts, a server that does not answer or refuses, a spent budget, a judge that gives
            no verdicts.
    """
    require_extras("finch evaluate --judge", "evaluate")
    comparisons = _read_comparisons(parsed)
    requests = {key: request for comparison in comparisons for key, request in comparison.requests.items()}
    log_path = comparisons[0].base.path.parent / LOG
    if parsed.dry_run:
        documents = sum(len(each.orders) for each in comparisons)
        calls = count_calls(log_path, requests.values(), "calls", "made")
        print(f"{documents:,} documents in {len(comparisons):,} results, {calls}")
        return
    require_extras("finch evaluate --judge", "openai")
    with RequestLog(log_path, parsed.max_tokens_budget) as log:
        try:
            _judge_missing(requests, log, parsed)
        finally:
            for comparison in comparisons:
                print(f"{comparison.tuned.path}: {_score(comparison, log, parsed.control)}", flush=True)
        if log.problems:
            reason = next(iter(log.problems.values()))
            print(f"{len(log.problems)} judgements count as unparsed, the first: {reason}; the same command asks again")
        print(f"{log_path}: {log.tokens:,} tokens taken", flush=True)


def _read_comparisons(parsed: argparse.Namespace) -> list[task.Comparison]:
    prompt = task.Prompt.of()
    if parsed.prompt is not None:
        text = read_prompt(parsed.prompt)
        prompt = task.Prompt.of(text, f"{parsed.prompt.name} {hashlib.sha256(text.encode()).hexdigest()[:8]}")
    options = (parsed.model, parsed.max_answer_tokens, prompt, parsed.limit)
    files = map(task.find_answers, parsed.results)
    comparisons = [task.read_comparison(file, *options, is_control=parsed.control) for file in files]
    bases = {comparison.base.path.resolve(): comparison for comparison in comparisons}
    if len(bases) > 1:
        raise UserError(f"the results are of {len(bases)} base models ({', '.join(map(str, bases))}); judge each apart")
    return list(bases.values()) if parsed.control else comparisons


def _judge_missing(requests: Mapping[str, ChatRequest], log: RequestLog, parsed: argparse.Namespace) -> None:
    from finch.base.progress import track

    missing = [request for key, request in requests.items() if key not in log.answers]
    num_answers = len(requests) - len(missing)
    if num_answers:
        logger.info(f"{num_answers:,} judgements by --model={parsed.model} of earlier starts are reused: {log.path}")
    has_verdict = any(task.parse_verdict(log.answers.get(key, "")) for key in requests)
    if missing and (has_verdict or num_answers < task.MIN_FIRST_ANSWERS):
        client = ChatClient(parsed.judge, log, timeout=parsed.timeout)
        with contextlib.closing(client.complete_all(missing, parsed.concurrency)) as results:
            for request in track(results, title="judging", total=len(missing), unit="judgement"):
                num_answers += 1
                has_verdict = has_verdict or task.parse_verdict(log.answers.get(request.key, "")) is not None
                if num_answers >= task.MIN_FIRST_ANSWERS and not has_verdict:
                    break
    if not has_verdict:
        reason = f" ({next(iter(log.problems.values()))})" if log.problems else ""
        raise UserError(
            f"--model={parsed.model}: none of its {num_answers} judgements in {log.path} ends with a verdict such as [[A>B]]{reason}; give another"
        )


def _score(comparison: task.Comparison, log: RequestLog, is_control: bool) -> str:
    """Writes the scores of a comparison if it is complete; what to print of it."""
    from finch.evaluation.statistics import mean_interval

    missing = comparison.requests.keys() - log.answers.keys() - log.problems.keys()
    if missing:
        return f"no score, {len(missing):,} judgements are missing"
    verdicts = comparison.verdicts(log.answers)
    scores = [each for each in task.score_documents(verdicts).values() if each is not None]
    if not scores:
        return "no score, no document has a verdict in both orders"
    metrics = task.summarize(verdicts.values())
    if not is_control:
        interval = mean_interval(task.write_scores(comparison, verdicts))
        low, high, score = (100 * value for value in (interval.low, interval.high, interval.mean))
        others = ", ".join(f"{name} {100 * (value or 0.0):.1f}" for name, value in metrics.items())
        return f"win_tie_rate {score:.1f} ({low:.1f} to {high:.1f}), n {len(scores):,}; {others}"
    control = sum(scores) / len(scores)
    if control != task.BASE_SCORE:
        raise UserError(
            f"control={100 * control:.2f} must be 50: equal answers got verdicts that differ between the orders; {log.path} has them"
        )
    task.write_base_scores(comparison, {"score": control, **metrics})
    ties, first = (100 * (metrics[name] or 0.0) for name in ("tie_rate", "first_answer_score"))
    return f"control 50 on {len(scores):,} documents; equal answers are ties in {ties:.1f}%, and the first one gets {first:.1f} (50: no preference)"
