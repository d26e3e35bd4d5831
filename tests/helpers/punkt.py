"""NLTK's punkt_tab without its data, enough for lm-eval's IFEval."""

from __future__ import annotations

from pathlib import Path

import pytest


def add_punkt_tab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four empty files in ``folder``, which NLTK then finds."""
    import nltk

    english = folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    english.mkdir(parents=True)
    for name in ("abbrev_types.txt", "collocations.tab", "sent_starters.txt", "ortho_context.tab"):
        (english / name).touch()
    monkeypatch.setenv("NLTK_DATA", str(folder / "nltk_data"))
    monkeypatch.setattr(nltk.data, "path", [str(folder / "nltk_data")])
