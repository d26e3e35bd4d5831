"""docs/compatibility.md says what is true of the torchtune that is installed."""

import runpy
from pathlib import Path

import pytest
import torchtune
from helpers.runs import ROOT

pytest.importorskip("bitsandbytes")  # configs that need it would read as refused

pytestmark = pytest.mark.skipif(
    not torchtune.__version__.startswith("0.6.1"), reason="the page is of torchtune 0.6.1's configs"
)


@pytest.fixture(scope="module")
def maker():
    return runpy.run_path(str(ROOT / "docs" / "compatibility.py"))


def test_every_text_config_passes_our_checks_as_shipped(maker):
    outcomes = {name: maker["outcome"](name) for _, name in maker["shipped"]() if "vision" not in name}
    assert len(outcomes) == 41
    assert outcomes == dict.fromkeys(outcomes)


def test_the_page_is_what_its_script_makes(maker):
    assert Path(maker["PAGE"]).read_text() == maker["page"](), "run python docs/compatibility.py"
