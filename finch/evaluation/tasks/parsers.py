"""The option's letter and the confidence that a generated text states."""

from __future__ import annotations

import re

# What surrounds a letter: brackets, quotes, Markdown's stars, LaTeX.
_MARK = r"[\s*_`\"'\u201c\u201d\u2018\u2019(\[{<$]*"
_LATEX = r"(?:\\(?:boxed|text|textbf|mathbf|mathrm)\{)*"
_LETTER = rf"{_MARK}{_LATEX}([A-Z])(?![\w\u2019'])(?!-\w)"

_ANSWER = re.compile(
    r"\b(?:[Aa]nswers?|ANSWER|(?:[Cc]orrect|[Rr]ight|[Bb]est) (?:answer|option|choice|letter|one)|[Ff]inal choice|(?:[Ii]|would) (?:choose|pick|select))"
    rf"[\s*_`\"'\u201d\u2019)\]]*(?:(?:is|are|be|would be|will be|should be|must be)\b)?[\s*_]*[:=]?\s*(?:(?:[Oo]ption|[Cc]hoice|[Ll]etter)\b)?{_LETTER}"
)
"""Such as "The answer is **C**", "Answer: (B)", "the correct option is D"."""

_LOWERCASE_ANSWER = re.compile(
    r"\b(?:answer|option)(?: is)?\s*:?\s*[(\[]?([a-z])(?:[)\].]|\s*$)", re.IGNORECASE | re.MULTILINE
)
"""Such as "answer: c" or "the answer is (b)"; letters followed by a word are articles."""

_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*([A-Z])\s*\}")

_LINE_START = re.compile(
    r"^[\s*_`\"'\u201c(\[#>-]*(?:[Oo]ption\s+)?([A-Z])(?:[\s*_`\"'\u201d]*[.):\]][\s*_`\"'\u201d)]*(?=\s|$|\S)|[\s*_`\"'\u201d)\]]*$|\s*,\s*\d)",
    re.MULTILINE,
)
"""Such as a line "C. a text", "**B)**", "(A)", "D" or "B, 85"."""

_ALONE = re.compile(r"(?<![\w\u2019'+=-])([A-Z])(?![\w\u2019'+=-])")

_NUMBER = r"(?<![\d.,])(-?(?:\d+(?:[.,]\d+)?|\.\d+))(?!\d)\s*(%|percent|per cent|(?:/|out of)\s*\d+)?"
_CONFIDENCE = re.compile(
    rf"(?:confiden(?:ce|t)|certainty|probability)\b(?:\s*\([^)]*\))?[^\d\n.-]{{0,40}}{_NUMBER}", re.IGNORECASE
)
_CONFIDENT = re.compile(rf"{_NUMBER}\s*(?:confiden(?:ce|t)|certain|sure)", re.IGNORECASE)
_ALONE_IN_LINE = re.compile(rf"^{_MARK}(?:[A-Z]\b[\s*_.,:;)\]-]*)?{_NUMBER}[\s*_.)\]]*$", re.MULTILINE | re.IGNORECASE)
"""Such as a line "85", "B, 85" or "(C) 70%"; a number within a sentence belongs to the answer."""


def letter_of(text: str, letters: str = "ABCD") -> str | None:
    """The last letter that a text states as its answer; None where it states none of ``letters``.

    Statements such as "the answer is C" go first, then letters that start a line, as in "C. a text", then single letters that
    are not the article A. What comes before the end of a ``</think>`` block is left out.
    """
    text = _without_reasoning(text)
    for pattern in (_ANSWER, _BOXED, _LOWERCASE_ANSWER):
        if stated := pattern.findall(text):
            letter = stated[-1].upper()
            return letter if letter in letters else None
    if stated := [letter for letter in _LINE_START.findall(text) if letter in letters]:
        return stated[-1]
    alone = [match for match in _ALONE.finditer(text) if match[1] in letters and not _is_article(text, match)]
    return alone[-1][1] if alone else None


def confidence_of(text: str) -> float | None:
    """The last confidence that a text states, between 0 and 100; None where there is none or it is out of range.

    A number next to the word confidence goes first, then one that has a line for itself or with a letter. A decimal of at most 1 without a
    percent sign is a probability: 0.85 is 85, and 1.0 is 100; 1 is 1.
    """
    text = _without_reasoning(text)
    for pattern in (_CONFIDENCE, _CONFIDENT, _ALONE_IN_LINE):
        if matches := list(pattern.finditer(text)):
            return _percent(*matches[-1].groups())
    return None


def _percent(number: str, unit: str | None) -> float | None:
    is_decimal = "." in number or "," in number
    if re.search(r",\d{3}$", number):  # a thousand
        return None
    value = float(number.replace(",", "."))
    if unit and (scale := re.search(r"\d+", unit)):  # 8/10, 9 out of 10, 85/100
        value = 100 * value / float(scale[0]) if float(scale[0]) else -1.0
    elif is_decimal and value <= 1 and not unit:
        value = 100 * value
    return value if 0 <= value <= 100 else None


def _is_article(text: str, match: re.Match[str]) -> bool:
    """Whether a letter is the article: an A before a word in lowercase."""
    return match[1] == "A" and re.match(r"\s+[a-z]", text[match.end() :]) is not None


def _without_reasoning(text: str) -> str:
    return text.rpartition("</think>")[2]
