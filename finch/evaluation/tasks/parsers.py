"""The option's letter and the confidence that a generated text states."""

from __future__ import annotations

import re
from collections.abc import Sequence

# What surrounds a letter: brackets, quotes, Markdown's stars, LaTeX.
_MARK = r"[\s*_`\"'\u201c\u201d\u2018\u2019(\[{<$]*"
_LATEX = r"(?:\\(?:boxed|text|textbf|mathbf|mathrm)\{)*"
_REASONS = "because|since|as|and|but|due|given|which|where"
_AFTER_LETTER = rf"(?:{_REASONS}|is|has|if|for|with|in|so|according|by|from|when|that|while|although|only)\b"
_LETTER = rf"{_MARK}{_LATEX}(?![AI]\s+(?!{_AFTER_LETTER})[a-z])([A-Z])(?!\w|[\u2019']\w|-\w)"
"""An A or I before a word in lowercase is the article or the pronoun."""

_IS = r"(?:is|are|be|would be|will be|should be|must be)\b"
_MEANT = r"(?:[Oo]ption|[Cc]hoice|[Ll]etter)\b"
_NO_OTHER = r"(?<![Ii]ncorrect )(?<![Ww]rong )(?<!other )(?<!Other )"
_ANSWER = re.compile(
    # "Answer A is wrong" speaks of an option.
    rf"\b{_NO_OTHER}(?![Aa]nswers? [A-Z] (?!(?:{_REASONS})\b)[a-z])(?:[Aa]nswers?|ANSWER|(?:[Cc]orrect|[Rr]ight|[Bb]est) (?:answer|option|choice|letter|one)|[Ff]inal choice|(?:[Ii]|would) (?:choose|pick|select))"
    rf"[\s*_`\"'\u201d\u2019)\]]*(?:{_IS}[\s*_]*[:=]?|[:=])?\s*(?:{_MEANT})?{_LETTER}"
)
"""Such as "The answer is **C**", "Answer: (B)", "the correct option is D"."""

_CORRECT = re.compile(
    r"(?<![\w\u2019'])([A-Z])\b\W{0,4}\s(?:is|would be)\s+(?:the\s+|most\s+)?(?:correct|right|best)\b"
)
"""Such as "C is correct"."""

_LOWERCASE_ANSWER = re.compile(
    r"\b(?:answer|option)(?: is)?\s*:?\s*[(\[]?([a-z])(?:[)\].]|\s*$)", re.IGNORECASE | re.MULTILINE
)
"""Such as "answer: c" or "the answer is (b)"; letters followed by a word are articles."""

_LOWERCASE_FIRST = re.compile(r"\A\W*([a-z])(?:[)\].]|\W*$)", re.MULTILINE)
"""At the text's start, such as "b" or "(b) a text"."""

_BOXED = re.compile(r"\\boxed\{\s*(?:\\text\{)?\s*([A-Z])\s*\}")

_LINE_START = re.compile(
    r"^[\s*_`\"'\u201c(\[#>-]*(?:[Oo]ption\s+)?([A-Z])(?:[\s*_`\"'\u201d]*[.):\]][\s*_`\"'\u201d)]*(?=\s|$|\S)|[\s*_`\"'\u201d)\]]*$|\s*,\s*\d)",
    re.MULTILINE,
)
"""Such as a line "C. a text", "**B)**", "(A)", "D" or "B, 85"."""

_ALONE = re.compile(r"(?<![\w\u2019'+=-])([A-Z])(?![\w\u2019'+=-])")

_NUMBER = r"(?<![\d.,])(-?(?:\d+(?:[.,]\d+)?|\.\d+))(?!\d)\s*(%|percent|per cent|(?:/|out of)\s*\d+)?"
_SCALE = re.compile(
    r"(?:on a scale\s+)?(?:(?:from|between|of)\s+)?\b0\s*%?\s*(?:and|to|-|\u2013)\s*100\b\s*%?", re.IGNORECASE
)
_CONFIDENCE_WORD = r"\b(?:confiden(?:ce|t)|certainty|probability)\b(?:\s*\([^)]*\))?"
_LABELLED = re.compile(rf"{_CONFIDENCE_WORD}[^\d\n:=.-]{{0,40}}(?:[:=]|\s[-\u2013]\s)[\s*_]*{_NUMBER}", re.IGNORECASE)
"""Such as "Confidence: 85"."""
_CONFIDENCE = re.compile(rf"{_CONFIDENCE_WORD}[^\d\n.-]{{0,40}}{_NUMBER}", re.IGNORECASE)
"""Such as "my confidence is 85"."""
_CONFIDENT = re.compile(rf"{_NUMBER}\s*(?:confiden(?:ce|t)|certain|sure)", re.IGNORECASE)
_ALONE_IN_LINE = re.compile(
    rf"^{_MARK}(?:answer\W+)?(?:[A-Z]\b[\s*_.,:;)(\]-]*)?{_NUMBER}[\s*_.)\]]*$", re.MULTILINE | re.IGNORECASE
)
"""Such as a line "85", "B, 85" or "(C) 70%"; a number within a sentence belongs to the answer."""


def letter_of(text: str, letters: str = "ABCD") -> str | None:
    """The last letter that a text states as its answer; None where it states none of ``letters``.

    Statements such as "the answer is C" go first, then letters that start a line, as in "C. a text", then single letters that
    are not the article A. What comes before the end of a ``</think>`` block is left out; one that does not end states nothing.
    """
    text = _without_reasoning(text)
    for pattern in (_ANSWER, _BOXED, _CORRECT, _LOWERCASE_ANSWER):
        if stated := pattern.findall(text):
            letter = stated[-1].upper()
            return letter if letter in letters else None
    if starts := [match for match in _LINE_START.finditer(text) if match[1] in letters]:
        return (starts[0] if _is_explained(text, starts, letters[0]) else starts[-1])[1]
    if (lowercase := _LOWERCASE_FIRST.match(text)) and lowercase[1].upper() in letters:
        return lowercase[1].upper()
    alone = [match for match in _ALONE.finditer(text) if match[1] in letters and not _is_article(text, match)]
    return alone[-1][1] if alone else None


def confidence_of(text: str) -> float | None:
    """The last confidence that a text states, between 0 and 100; None where there is none or it is out of range.

    A number after "confidence:" goes first, one next to the word, then one that has a line for itself or with a letter. A decimal of at most 1 without a
    percent sign is a probability: 0.85 is 85, and 1.0 is 100; 1 is 1.
    """
    text = _SCALE.sub("", _without_reasoning(text))
    for pattern in (_LABELLED, _CONFIDENT, _CONFIDENCE, _ALONE_IN_LINE):
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


def _is_explained(text: str, starts: Sequence[re.Match[str]], first_option: str) -> bool:
    """Whether the text begins with its answer, and speaks of other options after an empty line; a list of all begins with ``first_option``."""
    first, *others = starts
    is_apart = bool(others) and "\n\n" in text[first.start() : others[0].start()]
    return is_apart and first[1] != first_option and not text[: first.start()].strip()


def _is_article(text: str, match: re.Match[str]) -> bool:
    """Whether a letter is the article: an A before a word in lowercase."""
    return match[1] == "A" and re.match(r"\s+[a-z]", text[match.end() :]) is not None


def _without_reasoning(text: str) -> str:
    _, closing, rest = text.rpartition("</think>")
    # Reasoning that was cut off states nothing; of long runs, as of a model that repeats itself, patterns would take minutes.
    return "" if not closing and "<think>" in text else re.sub(r"([\s*_])\1{3,}", r"\1\1\1", rest)
