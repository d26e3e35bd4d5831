"""The page in headless Chromium: nothing overflows, nothing is missing, nothing is fetched."""

import re
import shutil

import pytest

WIDTHS, SCHEMES = (360, 1400), ("light", "dark")


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
    """A function that opens the report and returns its page, its console's errors and its requests."""
    pages = []

    def open_at(width, scheme):
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        pages.append(page)
        errors, requests = [], []
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto((report / "report.html").as_uri())
        return page, errors, requests

    yield open_at
    for page in pages:
        page.close()


def check_layout(page, num_figures):
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    sizes = page.evaluate("[...document.querySelectorAll('figure svg')].map(s => [s.clientWidth, s.clientHeight])")
    assert len(sizes) == num_figures
    assert all(width > 100 and height > 100 for width, height in sizes)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_page_in_chromium(page_at, report, width, scheme):
    page, errors, requests = page_at(width, scheme)
    check_layout(page, len(list((report / "figures").glob("*.svg"))))
    background, text = page.evaluate(
        "[getComputedStyle(document.documentElement).backgroundColor, getComputedStyle(document.querySelector('svg text')).fill]"
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) / 3 for colour in (background, text)]
    light, dark = brightness if scheme == "light" else reversed(brightness)
    assert light > 180
    assert dark < 100
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def test_page_in_print(page_at, report):
    page, errors, _ = page_at(794, "dark")  # A4's width at 96 pixels per inch
    page.emulate_media(media="print")
    check_layout(page, len(list((report / "figures").glob("*.svg"))))
    assert page.evaluate("getComputedStyle(document.querySelector('svg text')).fill") == "rgb(31, 35, 40)"
    assert len(page.pdf(format="A4")) > 10_000
    assert errors == []


def test_small_screen_has_readable_figures(page_at):
    page, _, _ = page_at(360, "light")
    heights = page.evaluate(
        "[...document.querySelectorAll('figure svg text')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(heights) > 8


def test_html_is_self_contained(report):
    html = (report / "report.html").read_text()
    assert "<script" not in html
    assert "<img" not in html
    assert "http:" not in re.sub(r"<a [^>]*>", "", html)
    assert "https:" not in re.sub(r"<a [^>]*>", "", html)
    assert "@import" not in html
    identifiers = re.findall(r'\bid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    for name in re.findall(r'(?:href="#|url\(#)([^")]+)', html):
        assert name in identifiers


def test_every_figure_is_a_file_and_in_both_texts(report):
    svgs = {path.stem for path in (report / "figures").glob("*.svg")}
    assert svgs == {path.stem for path in (report / "figures").glob("*.png")}
    assert {"trade_off", "front", "calibration", "reliability_halueval"} <= svgs
    assert {"learning_rate", "loss", "eta_sqrt_loss", "probe_facts_accuracy", "probe_stories_loss"} <= svgs
    html, markdown = (report / "report.html").read_text(), (report / "report.md").read_text()
    assert all(f'id="figure-{name}"' in html and f"figures/{name}.png" in markdown for name in svgs)
