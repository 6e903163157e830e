"""Numbers as people and LaTeX write them, compared exactly. Nothing is ever evaluated."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARACTERS = 4000  # of one number; more digits than Python converts from text
MAX_EXPONENT = 4000
TOLERANCE = Fraction(1, 10**9)  # relative, between numbers that are not both whole: 0.333333333333 is 1/3

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:[ \u00a0\u202f]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_FORMS = (
    re.compile(
        r"(?P<whole>\d+)? ?\\frac ?(?:\{(?P<top>[^{}]*)\}|(?P<top1>\d)) ?(?:\{(?P<bottom>[^{}]*)\}|(?P<bottom1>\d))"
    ),
    re.compile(rf"(?:(?P<whole>\d+) )?(?P<top>{_DECIMAL}) ?/ ?(?P<bottom>{_DECIMAL})"),
    re.compile(
        rf"(?P<top>{_DECIMAL})(?:[eE](?P<exponent>[+-]?\d{{1,5}})|(?: ?(?:\\times|\\cdot|×|\*) ?10 ?(?:\^|\*\*) ?"
        r"(?:\{(?P<exponent1>[+-]?\d{1,5})\}|(?P<exponent2>[+-]?\d{1,5}))))?"
    ),
)  # fmt: skip
_MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WORD = r"[^\W\d_]+(?:\^?\{?[23²³]\}?)?"
_UNIT = re.compile(rf"°?{_WORD}(?:(?: |/| ?per |-){_WORD}){{0,3}}|°|[$€£¥]")
# what one letter after a number may mean besides an unknown
_SINGLE_LETTERS = frozenset("mgshlLNJWVACFK$€£¥°")
_NO_UNITS = re.compile(r"\b(?:or|and|to|pi|dozen|half|quarter|minus|plus|times|over|squared|cubed)\b", re.IGNORECASE)
_STANDALONE = re.compile(
    rf"(?<![\w.,^{{}}\\/])(?<![\w)][*+−-])(?<!\*\*)[-−]?[$€£]?(?:{_DECIMAL})(?:/\d+)?%?(?![\w^{{}}!/*+]|[.,-]\d)"
    rf"|(?<=[\s:]\*\*)[-−]?[$€£]?(?:{_DECIMAL})(?=\*\*)"
)


@dataclass(frozen=True)
class Number:
    """A value, and whether it was written as a percentage (the value of "50%" is 50)."""

    value: Fraction
    percent: bool = False


def same(left: Number, right: Number) -> bool:
    """Equal values; where one of them alone is a percentage, as a number of percent or as a share."""
    if _close(left.value, right.value):
        return True
    if left.percent == right.percent:
        return False
    return _close(*(number.value / 100 if number.percent else number.value for number in (left, right)))


def _close(left: Fraction, right: Fraction) -> bool:
    if left == right:
        return True
    if left.denominator == 1 and right.denominator == 1:
        return False
    return abs(left - right) <= TOLERANCE * max(abs(left), abs(right))


def parse(text: str) -> Number | None:
    """The one number that `text` is, with units, currency and LaTeX around it; None if it is anything else.

    1,234 · 0.5 · -3 · 1/2 · 2 1/2 · \\frac{1}{2} · \\frac12 · 1.5e3 · 2 \\times 10^3 · 50% · $5 · 5 cm · x = 5 ·
    3 million. An expression is not a number: 9^9, 1/2004! and "5 or 6" give None.
    """
    if len(text) > MAX_CHARACTERS:
        return None
    text = _plain(text)
    text = text.rpartition("=")[2].strip()
    sign = -1 if text.startswith("-") else 1
    text = text.lstrip("+-").strip() if text[:1] in "+-" and text[1:2] not in ("+", "-") else text
    text = text.lstrip("$€£¥").strip()
    for form in _FORMS:
        match = form.match(text)
        if match and (scale := _scale(text[match.end() :].strip())) is not None:
            value = _value(match.groupdict())
            if value is not None:
                factor, percent = scale
                return Number(sign * value * factor, percent)
    return None


def last_standalone(text: str) -> Number | None:
    """The last number in running text that is not part of an expression or a word."""
    found = deque(_STANDALONE.finditer(text), maxlen=1)
    return parse(found[0].group()) if found else None


def _plain(text: str) -> str:
    """Without the LaTeX that only lays a number out."""
    text = text.replace("−", "-").replace("{,}", ",")
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s?\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[dtc]frac", r"\\frac", text)
    text = re.sub(r"\\[!,;: ]|\\left|\\right|\\[()\[\]]|\\quad|~", "", text)
    text = re.sub(r"\^\s?\{?\\circ\}?|\\degree", "°", text)
    text = text.replace("\\%", "%").replace("\\$", "$").strip(" *")
    while len(text) > 1 and text[0] == "$" and text[-1] == "$":
        text = text[1:-1].strip()
    return " ".join(text.rstrip(". *").split())


def _value(parts: dict[str, str | None]) -> Fraction | None:
    top = _decimal(parts["top"] or parts.get("top1") or "")
    if top is None:
        return None
    if "bottom" in parts:
        bottom = _decimal(parts["bottom"] or parts.get("bottom1") or "")
        whole = Fraction(int(parts["whole"])) if parts["whole"] else Fraction(0)
        return None if not bottom else whole + top / bottom
    exponent = int(parts["exponent"] or parts["exponent1"] or parts["exponent2"] or 0)
    return None if abs(exponent) > MAX_EXPONENT else top * Fraction(10) ** exponent


def _decimal(text: str) -> Fraction | None:
    text = text.strip()
    match = re.fullmatch(rf"[+-]?(?:{_DECIMAL})", text)
    return Fraction(re.sub(r"[, \u00a0\u202f]", "", text).rstrip(".")) if match else None


def _scale(rest: str) -> tuple[int, bool] | None:
    """What follows a number: a factor and whether it is a percentage; None if it is neither nothing nor a unit."""
    if not rest:
        return 1, False
    if rest.lower() in ("%", "percent"):
        return 1, True
    word, _, after = rest.partition(" ")
    if word.lower() in _MULTIPLES:
        scale = _scale(after.strip())
        return None if scale is None else (_MULTIPLES[word.lower()] * scale[0], scale[1])
    if len(rest) > 40 or not _UNIT.fullmatch(rest) or _NO_UNITS.search(rest):
        return None
    return (1, False) if len(rest) > 1 or rest in _SINGLE_LETTERS else None
