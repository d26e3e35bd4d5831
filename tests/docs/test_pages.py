"""What lies in docs/, and how long it may be."""

import re

from helpers.runs import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
GENERATED = ROOT / "docs" / "compatibility.md"


def test_docs_holds_pages_and_their_pictures():
    shown = {name for page in PAGES for name in re.findall(r"!\[[^\]]*\]\((?:docs/)?([^/)]+)\)", page.read_text())}
    others = {path.name for path in (ROOT / "docs").iterdir() if path.suffix != ".md"}
    assert others == shown


def test_readme_fits_a_screen_or_two_and_all_pages_an_afternoon():
    assert len(PAGES[0].read_text().splitlines()) <= 110
    assert sum(len(page.read_text().split()) for page in PAGES if page != GENERATED) <= 20_000
