"""`finch data translate`: rows of instruction, input and output in another language, through any server with OpenAI's protocol."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from finch.cli.server_options import add_server_options
from finch.errors import UserError
from finch.extras import require_extras

if TYPE_CHECKING:
    from finch.data.request_log import RequestLog
    from finch.data.translation import Translation

PROGRAM = "finch data translate"
LOG_SUFFIX = ".requests"
"""Of the file beside the output that records every call; not .jsonl, so that no pattern takes it for rows."""
MAX_FAILED = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data-files",
        nargs="+",
        required=True,
        metavar="FILE",
        help="rows of instruction, input and output: .jsonl, .json, .csv, .parquet",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the translated rows, as JSON Lines")
    parser.add_argument("--language", required=True, help="to translate into, such as Galician")
    add_server_options(parser, budget_of="this output", limit_of="rows")


def translate(parsed: argparse.Namespace) -> None:
    """Translates, or continues an earlier start.

    The output appears when every row is translated. Until then the complete rows are in FILE.partial.

    Raises:
        UserError: rows that cannot be used, a server that does not answer or refuses, a spent budget, answers that are of no use.
    """
    require_extras(PROGRAM, "torchtune")
    from finch.data.request_log import RequestLog, read_answers
    from finch.data.translation import read_translation

    out: Path = parsed.out
    if any(Path(file).resolve() == out.resolve() for file in parsed.data_files):
        raise UserError(f"--out={out} is one of the files to translate; give another path")
    if not out.parent.is_dir():
        raise UserError(f"--out={out}: there is no folder {out.parent}; create it")
    translation = read_translation(parsed.data_files, parsed.language, parsed.model, parsed.limit)
    log_path = out.with_name(out.name + LOG_SUFFIX)
    if parsed.dry_run:
        _print_plan(translation, read_answers(log_path))
        return
    require_extras(PROGRAM, "openai")
    with RequestLog(log_path, parsed.max_tokens_budget) as log:
        try:
            failed = _complete(translation, log, parsed)
        finally:
            _write(out, translation, log)
    if failed:
        raise UserError(
            f"--model={parsed.model}: {len(failed)} texts got no translation, the first is {failed[0]}; start the same command again, or give "
            "another model"
        )


def _complete(translation: Translation, log: RequestLog, parsed: argparse.Namespace) -> list[str]:
    """Makes the calls that are missing; returns which texts got no translation, and why."""
    from finch.data.chat_client import ChatClient, WrongAnswer
    from finch.progress import track

    requests = [request for request in translation.requests() if request.key not in log.answers]
    if not requests:
        return []
    failed: list[str] = []
    client = ChatClient(parsed.base_url, log, timeout=parsed.timeout)
    results = client.complete_all(requests, parsed.concurrency)
    for request, answer in track(results, title="translating", total=len(requests), unit="text"):
        if isinstance(answer, WrongAnswer):
            failed.append(f"{translation.place_of(request)}: {answer}")
        if len(failed) >= MAX_FAILED:
            client.stop()
    return failed


def _write(out: Path, translation: Translation, log: RequestLog) -> None:
    from finch.data.translation import write_rows
    from finch.files import PARTIAL

    rows = [row for row in translation.translate(log.answers) if row is not None]
    is_complete = len(rows) == len(translation.rows)
    file = out if is_complete else out.with_name(out.name + PARTIAL)
    if rows:
        write_rows(file, rows)
        count = f"{len(rows):,} rows" if is_complete else f"{len(rows):,} of {len(translation.rows):,} rows"
        print(f"{file}: {count} in {translation.language}, {log.tokens:,} tokens taken", flush=True)


def _print_plan(translation: Translation, answers: Mapping[str, str]) -> None:
    requests = translation.requests()
    missing = [request for request in requests if request.key not in answers]
    limit = sum(request.token_limit for request in missing)
    print(
        f"{len(translation.rows):,} rows, {len(requests):,} different texts, {len(requests) - len(missing):,} of them translated before; the "
        f"other {len(missing):,} take at most {limit:,} tokens, usually far fewer; nothing was sent"
    )
