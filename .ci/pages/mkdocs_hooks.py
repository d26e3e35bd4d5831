"""What mkdocs.yml cannot say: pages from outside docs/, generated pages, and links that hold on GitHub and on the site.

Links are written as GitHub reads them, relative to the file in the repository. One to a page of the site becomes a link to that page, one to
any other file of the repository a link to GitHub; one to nothing stays as it is, for mkdocs to find.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import generated
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
FROM_THE_ROOT = {
    "index.md": "README.md",
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    **{
        f"studies/{path.parent.name}/index.md": str(path.relative_to(ROOT)) for path in ROOT.glob("studies/*/README.md")
    },
}
"""Pages of the site by the file of the repository that they show."""
PICTURES = {".png", ".svg"}
SEARCH_BOOST = {"troubleshooting.md": 4, "recipe.md": 6, "changes.md": 0.2}
"""Where a search for a symptom, or for what a run does, should lead: other pages name the same words more often."""
_CODE = re.compile(r"(^ *(```+|~~~+).*?^ *\2 *$|`+[^`\n]+`+)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")
_ROLE = re.compile(r":(?:class|meth|func|attr|mod):(?=<code>)")


def on_config(config: Any) -> Any:
    """Anchors are GitHub's. Where mike builds, the header lists the versions."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that do not lie in docs/, and the pictures of the studies."""
    for uri, name in FROM_THE_ROOT.items():
        head = "---\nhide: [navigation]\n---\n" if uri == "index.md" else ""  # it has no neighbours
        files.append(File.generated(config, uri, content=head + (ROOT / name).read_text(encoding="utf-8")))
    for uri, text in generated.pages().items():
        files.append(File.generated(config, uri, content=text))
    for path in ROOT.glob("studies/*/results/**/*"):
        if path.suffix in PICTURES:
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites links, and lists as Python-Markdown reads them."""
    uri = page.file.src_uri
    if uri in SEARCH_BOOST:
        page.meta["search"] = {"boost": SEARCH_BOOST[uri]}
    if uri in generated.pages():
        return markdown
    source = PurePosixPath(FROM_THE_ROOT.get(uri, f"docs/{uri}"))
    pages = {FROM_THE_ROOT.get(file.src_uri, f"docs/{file.src_uri}"): file.src_uri for file in files}
    pages |= {file.src_uri: file.src_uri for file in files if file.src_uri.startswith("studies/")}

    def rewritten(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        target = os.path.normpath(source.parent / path)
        if target in pages:
            path = os.path.relpath(pages[target], PurePosixPath(uri).parent)
        elif not target.startswith("..") and (ROOT / target).exists():
            path = f"{config.repo_url}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}"
        return f"{link[1]}{path}{mark}{anchor}{link[3]}"

    return outside_code(_python_markdown(markdown), lambda text: _LINK.sub(rewritten, text))


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name classes as Sphinx does; the name is enough."""
    return _ROLE.sub("", html)


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """``markdown`` with what is neither fenced nor inline code changed."""
    parts = _CODE.split(markdown)  # text, code, its fence, text, ...
    return "".join(change(part) if i % 3 == 0 else part if i % 3 == 1 else "" for i, part in enumerate(parts))


def _python_markdown(markdown: str) -> str:
    """Python-Markdown wants a blank line before a list, and four spaces where CommonMark wants two or three."""
    lines: list[str] = []
    is_code, shift = False, 0  # 0: not in a list
    for line in markdown.split("\n"):
        item = None if is_code else re.match(r"([-*]|\d+\.) ", line)
        if item is not None:
            if not shift and lines and lines[-1].strip():
                lines.append("")
            shift = 4 - len(item[0])
        elif line.startswith("  ") and shift:
            line = " " * shift + line
        elif line.strip() and not is_code and not (lines and lines[-1].strip()):
            shift = 0
        is_code ^= line.lstrip().startswith(("```", "~~~"))
        lines.append(line)
    return "\n".join(lines)
