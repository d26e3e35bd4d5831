"""`finch judge`: the language task's scores, from a judge behind any server with OpenAI's protocol."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finch.cli.server_options import add_server_options, positive_int
from finch.errors import UserError
from finch.extras import require_extras

if TYPE_CHECKING:
    from finch.data.request_log import RequestLog
    from finch.evaluation.judge import Comparison

PROGRAM = "finch judge"
LOG = "language.requests"
"""In the base model's folder: every call and its answer; not .json, so that no reader takes it for a result."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a tuned model's answers, made with `finch evaluate --suite language`: a run, or a folder of results",
    )
    add_server_options(parser, budget_of="one base model", limit_of="documents")
    parser.add_argument(
        "--max-answer-tokens",
        type=positive_int,
        default=1024,
        metavar="N",
        help="of a judgement, its reasons included (default: 1024)",
    )
    parser.add_argument(
        "--control", action="store_true", help="judge the base model's answers against themselves, which must give 50"
    )


def judge(parsed: argparse.Namespace) -> None:
    """Judges, or continues an earlier start, and writes the scores of each result whose judgements are complete.

    Raises:
        UserError: answers that are missing or of different prompts, a server that does not answer or refuses, a spent budget, a judge that gives
            no verdicts.
    """
    require_extras(PROGRAM, "evaluate")
    from finch.data.request_log import RequestLog, read_answers

    comparisons = _read_comparisons(parsed)
    log_path = comparisons[0].base.path.parent / LOG
    if parsed.dry_run:
        _print_plan(comparisons, read_answers(log_path))
        return
    require_extras(PROGRAM, "openai")
    with RequestLog(log_path, parsed.max_tokens_budget) as log:
        useless: dict[str, str] = {}
        try:
            _ask(comparisons, log, useless, parsed)
        finally:
            _write(comparisons, log, useless, parsed)
        if useless:
            print(
                f"--model={parsed.model}: {len(useless)} judgements count as unparsed, the first since {next(iter(useless.values()))}; the same "
                "command asks for them again, and --max-answer-tokens gives them more room"
            )
        print(f"{log_path}: {log.tokens:,} tokens taken", flush=True)


def _read_comparisons(parsed: argparse.Namespace) -> list[Comparison]:
    from finch.evaluation.judge import Judge, find_answers, read_comparison, read_control

    judge_model = Judge(parsed.model, parsed.max_answer_tokens)
    read = read_control if parsed.control else read_comparison
    comparisons = [read(find_answers(path), judge_model, parsed.limit) for path in parsed.results]
    bases = {comparison.base.path.resolve(): comparison for comparison in comparisons}
    if len(bases) > 1:
        raise UserError(f"the results are of {len(bases)} base models ({', '.join(map(str, bases))}); judge each apart")
    return list(bases.values()) if parsed.control else comparisons


def _ask(
    comparisons: Sequence[Comparison], log: RequestLog, useless: dict[str, str], parsed: argparse.Namespace
) -> None:
    """Makes the calls that are missing; adds the keys of those without a usable answer, and why, to ``useless``."""
    from finch.data.chat_client import ChatClient, WrongAnswer
    from finch.evaluation.judge import MIN_FIRST_ANSWERS, parse_verdict
    from finch.progress import track

    requests = {key: request for comparison in comparisons for key, request in comparison.requests.items()}
    texts = [log.answers[key] for key in requests if key in log.answers]
    missing = [request for key, request in requests.items() if key not in log.answers]
    num_answers, has_verdict = len(texts), any(map(parse_verdict, texts))
    if missing and (has_verdict or num_answers < MIN_FIRST_ANSWERS):
        client = ChatClient(parsed.base_url, log, timeout=parsed.timeout)
        results = client.complete_all(missing, parsed.concurrency)
        for request, answer in track(results, title="judging", total=len(missing), unit="judgement"):
            if isinstance(answer, WrongAnswer):
                useless[request.key] = str(answer)
            elif parse_verdict(answer):
                has_verdict = True
            num_answers += 1
            if num_answers >= MIN_FIRST_ANSWERS and not has_verdict:
                client.stop()
    if not has_verdict:
        raise UserError(
            f"--model={parsed.model}: none of its {num_answers} judgements ends with a verdict such as [[A>B]]; read them in {log.path}, and give "
            "another model"
        )


def _write(
    comparisons: Sequence[Comparison], log: RequestLog, useless: Mapping[str, str], parsed: argparse.Namespace
) -> None:
    """Writes and prints the scores of the comparisons that are complete."""
    from finch.evaluation.judge import score_documents, write_base_scores, write_scores

    is_base_written = False
    for comparison in comparisons:
        missing = comparison.requests.keys() - log.answers.keys() - useless.keys()
        has_score = any(score is not None for score in score_documents(comparison.verdicts(log.answers)).values())
        if missing or not has_score:
            reason = (
                f"{len(missing):,} judgements are missing" if missing else "no document has a verdict in both orders"
            )
            print(f"{comparison.tuned.path}: no score, {reason}", flush=True)
        elif parsed.control:
            _write_control(comparison, log)
        else:
            if not is_base_written:
                write_base_scores(comparison)
                is_base_written = True
            _print_score(comparison.tuned.path, write_scores(comparison, log.answers))


def _write_control(comparison: Comparison, log: RequestLog) -> None:
    from finch.evaluation.judge import BASE_SCORE, score_documents, summarize, write_base_scores

    verdicts = comparison.verdicts(log.answers)
    scores = [score for score in score_documents(verdicts).values() if score is not None]
    control, metrics = sum(scores) / len(scores), summarize(verdicts.values())
    if control != BASE_SCORE:
        raise UserError(
            f"control={100 * control:.2f} must be 50: equal answers got verdicts that differ between the orders; {log.path} has them"
        )
    write_base_scores(comparison, {"score": control, **metrics})
    ties, first = (100 * (metrics[name] or 0.0) for name in ("tie_rate", "first_answer_score"))
    print(
        f"{comparison.base.path}: control 50 on {len(scores):,} documents; of two equal answers the judge calls {ties:.1f}% ties, and gives "
        f"the first one {first:.1f} (50: no preference for a place)",
        flush=True,
    )


def _print_score(path: Path, metrics: Mapping[str, float | None]) -> None:
    from finch.evaluation.judge import TASK
    from finch.evaluation.results import read_result, read_samples
    from finch.evaluation.statistics import mean_interval

    task = read_result(path).tasks[TASK]
    interval = mean_interval(read_samples(path.parent, task))
    low, high, score = (100 * value for value in (interval.low, interval.high, interval.mean))
    others = ", ".join(f"{name} {100 * (value or 0.0):.1f}" for name, value in metrics.items())
    print(f"{path}: {task.metric} {score:.1f} ({low:.1f} to {high:.1f}), n {task.n:,}; {others}", flush=True)


def _print_plan(comparisons: Sequence[Comparison], answers: Mapping[str, str]) -> None:
    requests = {key: request for comparison in comparisons for key, request in comparison.requests.items()}
    missing = [request for key, request in requests.items() if key not in answers]
    limit = sum(request.token_limit for request in missing)
    num_documents = sum(comparison.num_documents for comparison in comparisons)
    print(
        f"{num_documents:,} documents in {len(comparisons):,} results, {len(requests):,} different calls, {len(requests) - len(missing):,} of them "
        f"made before; the other {len(missing):,} take at most {limit:,} tokens, usually far fewer; nothing was sent"
    )
