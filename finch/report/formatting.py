"""How numbers are written for people: percent, points, nats, intervals, p values."""

from __future__ import annotations

from finch.evaluation.results import POINTS
from finch.report.measures import Estimate
from finch.report.selection import Measure

MINUS, NONE = "\N{MINUS SIGN}", "\N{EN DASH}"


def digits(unit: str) -> int:
    return 1 if unit == POINTS else 3


def number(value: float | None, places: int, *, sign: bool = False) -> str:
    """A rounded number, zero without a sign; a dash for None."""
    if value is None:
        return NONE
    rounded = round(value, places) + 0.0
    text = f"{rounded:{'+' if sign and rounded else ''}.{places}f}"
    return text.replace("-", MINUS)


def estimate(one: Estimate | None, places: int, *, scale: float = 1.0, sign: bool = False, unit: str = "") -> str:
    """``-3.1 [-4.0, -2.2]``, with the unit after the number; without brackets where there is no interval."""
    if one is None:
        return NONE
    text = number(scale * one.value, places, sign=sign) + unit
    if one.low is None or one.high is None:
        return text
    low, high = (number(scale * bound, places, sign=sign) for bound in (one.low, one.high))
    return f"{text} [{low}, {high}]"


def p_value(value: float | None) -> str:
    if value is None:
        return NONE
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def rate(value: float | None) -> str:
    """A learning rate: ``2e-5``."""
    if value is None:
        return NONE
    mantissa, _, exponent = f"{value:.3e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def unit_name(measure: Measure) -> str:
    return "%" if measure.unit == POINTS else "nats a token"
