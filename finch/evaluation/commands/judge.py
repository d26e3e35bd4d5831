"""The commands that ask a language model on a server with OpenAI's protocol: `finch judge` and `finch data translate`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from finch.base.errors import UserError
from finch.base.extras import require_extras
from finch.cli.arguments import positive

if TYPE_CHECKING:
    from finch.evaluation.chat_client import ChatRequest, RequestLog, Translation
    from finch.evaluation.judge import Comparison

JUDGE_LOG = "language.requests"
"""In the base model's folder: every call and its answer. Not .json, so that no reader takes it for a result."""
TRANSLATE_LOG_SUFFIX = ".requests"
"""Of the file next to the output that records every call. Not .jsonl, so that no pattern takes it for rows."""
MAX_FAILED = 20
"""A model that leaves that many texts without a translation is stopped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a tuned model's answers, made with `finch evaluate --suite language`: a run, or a folder of results",
    )
    _add_server_arguments(parser, budget_of="one base model", limit_of="documents")
    parser.add_argument(
        "--max-answer-tokens",
        type=positive(int),
        default=1024,
        metavar="N",
        help="of a judgement, its reasons included (default: 1024)",
    )
    parser.add_argument(
        "--control", action="store_true", help="judge the base model's answers against themselves, which must give 50"
    )


def add_translate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-files",
        nargs="+",
        required=True,
        metavar="FILE",
        help="rows of instruction, input and output: .jsonl, .json, .csv, .parquet",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the translated rows, as JSON Lines")
    parser.add_argument("--language", required=True, help="to translate into, such as Galician")
    _add_server_arguments(parser, budget_of="this output", limit_of="rows")


def _add_server_arguments(parser: argparse.ArgumentParser, *, budget_of: str, limit_of: str) -> None:
    parser.add_argument(
        "--base-url", required=True, metavar="URL", help="of the server, such as http://localhost:8000/v1"
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="its name on the server")
    parser.add_argument(
        "--max-tokens-budget",
        type=positive(int),
        metavar="N",
        help=f"tokens that all calls for {budget_of} may take, prompts and answers, earlier starts included (default: no limit)",
    )
    parser.add_argument("--limit", type=positive(int), metavar="N", help=f"only the first N {limit_of}")
    parser.add_argument(
        "--concurrency", type=positive(int), default=4, metavar="N", help="calls at a time (default: 4)"
    )
    parser.add_argument(
        "--timeout", type=positive(int), default=120, metavar="SECONDS", help="of a call (default: 120)"
    )
    parser.add_argument("--dry-run", action="store_true", help=f"count {limit_of}, calls and tokens, and send nothing")


def main(parsed: argparse.Namespace) -> None:
    """Judges, or continues an earlier start, and writes the scores of each result whose judgements are complete.

    Raises:
        UserError: answers that are missing or of different prompts, a server that does not answer or refuses, a spent budget, a judge that gives
            no verdicts.
    """
    require_extras("finch judge", "evaluate")
    from finch.evaluation.chat_client import RequestLog, read_answers

    comparisons = _read_comparisons(parsed)
    requests = {key: request for comparison in comparisons for key, request in comparison.requests.items()}
    log_path = comparisons[0].base.path.parent / JUDGE_LOG
    if parsed.dry_run:
        num_documents = sum(len(comparison.orders) for comparison in comparisons)
        title = f"{num_documents:,} documents in {len(comparisons):,} results, {len(requests):,} different calls"
        _print_plan(title, "made", requests.values(), read_answers(log_path))
        return
    require_extras("finch judge", "openai")
    with RequestLog(log_path, parsed.max_tokens_budget) as log:
        useless: dict[str, str] = {}
        try:
            _judge_missing(requests, log, useless, parsed)
        finally:
            _write_judgements(comparisons, log, useless, parsed)
        if useless:
            print(
                f"--model={parsed.model}: {len(useless)} judgements count as unparsed, the first since {next(iter(useless.values()))}; the same "
                "command asks for them again, and --max-answer-tokens gives them more room"
            )
        print(f"{log_path}: {log.tokens:,} tokens taken", flush=True)


def _read_comparisons(parsed: argparse.Namespace) -> list[Comparison]:
    from finch.evaluation.judge import find_answers, read_comparison

    comparisons = [
        read_comparison(
            find_answers(path), parsed.model, parsed.max_answer_tokens, parsed.limit, is_control=parsed.control
        )
        for path in parsed.results
    ]
    bases = {comparison.base.path.resolve(): comparison for comparison in comparisons}
    if len(bases) > 1:
        raise UserError(f"the results are of {len(bases)} base models ({', '.join(map(str, bases))}); judge each apart")
    return list(bases.values()) if parsed.control else comparisons


def _judge_missing(
    requests: Mapping[str, ChatRequest], log: RequestLog, useless: dict[str, str], parsed: argparse.Namespace
) -> None:
    """Makes the calls that are missing; adds the keys of those without a usable answer, and why, to ``useless``."""
    from finch.base.progress import track
    from finch.evaluation.chat_client import ChatClient, WrongAnswer
    from finch.evaluation.judge import MIN_FIRST_ANSWERS, parse_verdict

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
        reason = f" ({next(iter(useless.values()))})" if useless else ""
        raise UserError(
            f"--model={parsed.model}: none of its {num_answers} judgements ends with a verdict such as [[A>B]]{reason}; read them in {log.path}, and "
            "give another model"
        )


def _write_judgements(
    comparisons: Sequence[Comparison], log: RequestLog, useless: Mapping[str, str], parsed: argparse.Namespace
) -> None:
    """Writes and prints the scores of the comparisons that are complete."""
    from finch.evaluation.judge import score_documents, write_base_scores, write_scores

    is_base_written = False
    for comparison in comparisons:
        missing = comparison.requests.keys() - log.answers.keys() - useless.keys()
        scores = [each for each in score_documents(comparison.verdicts(log.answers)).values() if each is not None]
        if missing or not scores:
            reason = (
                f"{len(missing):,} judgements are missing" if missing else "no document has a verdict in both orders"
            )
            print(f"{comparison.tuned.path}: no score, {reason}", flush=True)
        elif parsed.control:
            _write_control(comparison, scores, log)
        else:
            if not is_base_written:
                write_base_scores(comparison)
                is_base_written = True
            _print_score(comparison.tuned.path, write_scores(comparison, log.answers))


def _write_control(comparison: Comparison, scores: Sequence[float], log: RequestLog) -> None:
    from finch.evaluation.judge import BASE_SCORE, summarize, write_base_scores

    control, metrics = sum(scores) / len(scores), summarize(comparison.verdicts(log.answers).values())
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


def translate(parsed: argparse.Namespace) -> None:
    """Translates, or continues an earlier start.

    The output appears when every row is translated. Until then the complete rows are in FILE.partial.

    Raises:
        UserError: rows that cannot be used, a server that does not answer or refuses, a spent budget, answers that are of no use.
    """
    require_extras("finch data translate", "torchtune")
    from finch.evaluation.chat_client import RequestLog, read_answers, read_translation

    out: Path = parsed.out
    if any(Path(file).resolve() == out.resolve() for file in parsed.data_files):
        raise UserError(f"--out={out} is one of the files to translate; give another path")
    if not out.parent.is_dir():
        raise UserError(f"--out={out}: there is no folder {out.parent}; create it")
    translation = read_translation(parsed.data_files, parsed.language, parsed.model, parsed.limit)
    log_path = out.with_name(out.name + TRANSLATE_LOG_SUFFIX)
    if parsed.dry_run:
        requests = translation.requests()
        title = f"{len(translation.rows):,} rows, {len(requests):,} different texts"
        _print_plan(title, "translated", requests, read_answers(log_path))
        return
    require_extras("finch data translate", "openai")
    with RequestLog(log_path, parsed.max_tokens_budget) as log:
        try:
            failed = _translate_missing(translation, log, parsed)
        finally:
            _write_translation(out, translation, log)
    if failed:
        raise UserError(
            f"--model={parsed.model}: {len(failed)} texts got no translation, the first is {failed[0]}; start the same command again, or give "
            "another model"
        )


def _translate_missing(translation: Translation, log: RequestLog, parsed: argparse.Namespace) -> list[str]:
    """Makes the calls that are missing; returns which texts got no translation, and why."""
    from finch.base.progress import track
    from finch.evaluation.chat_client import ChatClient, WrongAnswer

    requests = [request for request in translation.requests() if request.key not in log.answers]
    if not requests:
        return []
    failed: list[str] = []
    client = ChatClient(parsed.base_url, log, timeout=parsed.timeout)
    results = client.complete_all(requests, parsed.concurrency)
    for request, answer in track(results, title="translating", total=len(requests), unit="text"):
        if isinstance(answer, WrongAnswer):
            failed.append(f"{translation.locate(request)}: {answer}")
        if len(failed) >= MAX_FAILED:
            client.stop()
    return failed


def _write_translation(out: Path, translation: Translation, log: RequestLog) -> None:
    from finch.base.files import PARTIAL
    from finch.evaluation.chat_client import write_rows

    rows = [row for row in translation.translate(log.answers) if row is not None]
    is_complete = len(rows) == len(translation.rows)
    file = out if is_complete else out.with_name(out.name + PARTIAL)
    if rows:
        write_rows(file, rows)
        count = f"{len(rows):,} rows" if is_complete else f"{len(rows):,} of {len(translation.rows):,} rows"
        print(f"{file}: {count} in {translation.language}, {log.tokens:,} tokens taken", flush=True)


def _print_plan(title: str, done: str, requests: Collection[ChatRequest], answers: Mapping[str, str]) -> None:
    missing = [request for request in requests if request.key not in answers]
    limit = sum(request.token_limit for request in missing)
    print(
        f"{title}, {len(requests) - len(missing):,} of them {done} before; the other {len(missing):,} take at most {limit:,} tokens, usually far "
        "fewer; nothing was sent"
    )
