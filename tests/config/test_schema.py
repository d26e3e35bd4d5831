"""The page of keys is made from the options."""

import runpy

from helpers.runs import ROOT


def test_the_page_lists_every_key():
    table = runpy.run_path(str(ROOT / "docs" / "keys.py"))["table"]()
    assert table.strip() in (ROOT / "docs" / "recipe.md").read_text()
