"""The page in headless Chromium: nothing overflows, nothing is missing, nothing is fetched."""

import re
import shutil

import pytest


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page_at(browser, report):
    """A function that opens the report and returns its page, and a list of its console's errors and of what it fetches."""

    def open_at(width, scheme):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        problems = []
        page.on("console", lambda message: problems.extend([message.text] if message.type == "error" else []))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: problems.extend(re.findall("^(?!file:|data:).*", request.url)))
        page.goto((report / "report.html").as_uri())
        opened.append(page)
        return page, problems

    opened = []
    yield open_at
    for page in opened:
        page.close()


def check_layout(page, report):
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    sizes = page.evaluate("[...document.querySelectorAll('figure svg')].map(s => [s.clientWidth, s.clientHeight])")
    assert len(sizes) == len(list((report / "figures").glob("*.svg")))
    assert all(width > 100 and height > 100 for width, height in sizes)


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1400, "dark")])
def test_page_in_chromium(page_at, report, width, scheme):
    """The numbers are on the screen of a phone; the right half of a wide page is used, and no table of it is cut."""
    page, problems = page_at(width, scheme)
    check_layout(page, report)
    colours = page.evaluate(
        "[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.querySelector('svg text')).fill]"
    )
    background, text = (sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in colours)
    assert min(background, text) < 100
    assert max(background, text) > 180
    assert (background > text) == (scheme == "light")
    heights = "[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height)"
    assert min(page.evaluate(heights)) > 8  # can be read
    edge = "getComputedStyle(document.querySelector('.scroll')).backgroundAttachment"
    assert page.evaluate(edge) == "local, scroll"  # the shadow of what is cut, and what hides it at the end
    if width == 360:
        right = """[...document.querySelectorAll('#front ~ .scroll table')].map(
            t => t.querySelector('tbody tr').children[1].getBoundingClientRect().right)"""
        ends = page.evaluate(right)
        assert len(ends) == 3
        assert max(ends) <= 360
    else:
        right = """[...document.querySelectorAll('main > section')].map(
            s => Math.max(...[...s.querySelectorAll('figure svg, table, .summary > div')].map(e => e.getBoundingClientRect().right)))"""
        assert min(page.evaluate(right)) > 1200
        tables = "[...document.querySelectorAll('#front ~ .scroll')].map(s => s.scrollWidth - s.clientWidth)"
        assert max(page.evaluate(tables)) == 0
    assert problems == []


def test_page_in_print(page_at, report):
    page, problems = page_at(794, "dark")  # A4's width at 96 pixels per inch
    page.emulate_media(media="print")
    check_layout(page, report)
    assert page.evaluate("getComputedStyle(document.querySelector('svg text')).fill") == "rgb(31, 35, 40)"
    assert len(page.pdf(format="A4")) > 10_000
    assert problems == []


def test_facts_are_at_the_top(report):
    facts = "Model: llama2, stories260k; Task: tofu (knowledge); Rows: tofu.jsonl; Steps: "
    html, markdown = (report / "report.html").read_text(), (report / "report.md").read_text()
    assert markdown.splitlines()[2].startswith(facts)
    assert re.search(r"; Date: \d{4}-\d\d-\d\d$", markdown.splitlines()[2])
    top = re.sub("<[^>]*>", " ", html[html.index("<dl>") : html.index("</dl>")]).split()
    assert top[: len(facts.split())] == re.sub("[:;]", "", facts).split()


def test_html_is_self_contained(report):
    html = (report / "report.html").read_text()
    assert re.findall("<script|<img|https?:|@import", re.sub(r"<a [^>]*>", "", html)) == []
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(identifiers)


def test_every_figure_is_a_file_and_in_both_texts(report):
    svgs = {path.stem for path in (report / "figures").glob("*.svg")}
    assert svgs == {path.stem for path in (report / "figures").glob("*.png")}
    assert {"trade_off", "front", "calibration", "reliability_halueval"} <= svgs
    assert {"learning_rate", "loss", "eta_sqrt_loss", "dose_own", "probe_facts_accuracy", "probe_stories_loss"} <= svgs
    html, markdown = (report / "report.html").read_text(), (report / "report.md").read_text()
    assert all(f'id="figure-{name}"' in html and f"figures/{name}.png" in markdown for name in svgs)
