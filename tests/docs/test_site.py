"""The site: dead links fail its build, each page fits a telephone and loads nothing from other servers, and the search finds keys."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading

import pytest
from helpers.runs import ROOT

pytestmark = pytest.mark.slow

SEARCHES = {
    "self_replay.strength": ("reference/keys", 99),
    "out of memory": ("troubleshooting", 1),
    "resume": ("recipe", 1),
}
"""What is typed, and a page that is found, at this place or before."""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the site is made of, with links to the rest."""
    copied = (".ci", "docs", "studies", "mkdocs.yml")
    for name in copied:
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, tmp_path / name)
    for path in ROOT.iterdir():
        if path.name not in (*copied, ".git", "out"):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def build(checkout):
    paths = f"{checkout}:{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", checkout / "site"],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": paths, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


@pytest.fixture
def address(tmp_path):
    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path / "site")
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_site(checkout, address):
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    faq = checkout / "docs" / "faq.md"
    text = faq.read_text()
    faq.write_text(f"{text}\n[a](gone.md) [b](../gone.py) [c](data.md#gone)\n")
    failed = build(checkout)
    assert failed.returncode != 0
    assert all(
        part in failed.stdout + failed.stderr for part in ("'gone.md'", "'../gone.py'", "'#gone'", "3 warnings")
    ), failed.stderr

    faq.write_text(text)
    done = build(checkout)
    assert done.returncode == 0, done.stderr
    if (program := shutil.which("chromium")) is None:
        pytest.skip("chromium is not installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page, fetched, problems = browser.new_page(viewport={"width": 360, "height": 900}), [], []
        page.on("request", lambda request: fetched.append(request.url))
        page.on("console", lambda message: problems.extend([message.text] if message.type == "error" else []))
        for file in (checkout / "site").rglob("index.html"):
            page.goto(address + str(file.parent.relative_to(checkout / "site")))
            page.wait_for_selector("h1")
            assert page.evaluate("document.scrollingElement.scrollWidth") <= 360, file
        page.goto(address)
        page.click("label[for=__search]")
        for words, (found, place) in SEARCHES.items():
            page.fill(".md-search__input", "")
            page.type(".md-search__input", words)
            page.wait_for_selector(
                f".md-search-result__item:nth-child(-n+{place}) a[href*='{found}']", state="attached"
            )
        browser.close()
    assert [url for url in fetched if not url.startswith(address)] == problems == []
