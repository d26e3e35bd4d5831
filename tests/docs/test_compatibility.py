"""docs/compatibility.md holds for the installed torchtune."""

import runpy

import pytest
import torchtune
from helpers.runs import ROOT

pytest.importorskip("bitsandbytes")  # configs that need it would be refused

pytestmark = pytest.mark.skipif(
    not torchtune.__version__.startswith("0.6.1"), reason="the page is about torchtune 0.6.1's configs"
)


def test_compatibility_page_is_current():
    script = runpy.run_path(str(ROOT / ".ci" / "pages" / "compatibility.py"))
    page = script["page"]()
    text_configs = [name for _, name in script["torchtune_configs"]() if "vision" not in name]
    assert len(text_configs) == page.count("| runs |") == 41
    assert script["PAGE"].read_text() == page, "run python .ci/pages/compatibility.py"
