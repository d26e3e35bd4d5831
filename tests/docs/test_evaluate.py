"""docs/evaluate.md: it has every option of the command, and no other."""

import argparse
import re

from helpers.runs import ROOT

from finch.evaluation.commands.evaluate import add_arguments


def test_page_has_the_options_of_the_command():
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = {action.option_strings[0] for action in parser._actions} - {"-h"}
    page = (ROOT / "docs" / "evaluate.md").read_text()
    assert set(re.findall(r"^\| `(--[\w-]+)", page, re.MULTILINE)) == options
