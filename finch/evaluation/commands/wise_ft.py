"""`finch average --tuned`: weights between the pretrained and the tuned model's."""

from __future__ import annotations

import argparse
from pathlib import Path

from finch.base.extras import require_extras
from finch.base.log import printable
from finch.evaluation.commands.arguments import find_models
from finch.models.hf_config import check_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--base", required=True, metavar="DIR", help="the pretrained model's folder, or its name on the hub")
    add("--alpha", type=float, nargs="+", default=[0.5], help="the tuned model's share, or several (default: 0.5)")
    text = "folder for the results, one folder alpha_A for each alpha (default: average)"
    add("--out", type=Path, default=Path("average"), metavar="DIR", help=text)


def main(parsed: argparse.Namespace) -> None:
    """Writes the interpolated models and prints their folders."""
    require_extras("finch average", "torchtune")
    find_models(parsed)
    for option, path in (("--base", parsed.base), ("--tuned", Path(parsed.tuned))):
        check_folder(path, option)  # before torch is imported
    from finch.evaluation.wise_ft import wise_ft as interpolate

    for folder in interpolate(parsed.base, parsed.tuned, parsed.alpha, parsed.out):
        print(printable(str(folder)))
