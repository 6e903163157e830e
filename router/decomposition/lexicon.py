"""The words of lexicon.toml, made ready to be looked up: whole words, stems, and phrases."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

_WORD = re.compile(r"[^\W_]+(?:(?:['._+#-]|\+\+|#)[^\W_]+)*(?:\+\+|#)?")
_DENSE = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")  # scripts without spaces, and Hangul


def words(text: str) -> list[str]:
    """Lower-case words of a text, with inner apostrophes, hyphens and dots."""
    return _WORD.findall(text.lower().replace("’", "'"))


class Table:
    """Entries -> names, found in words and in text; an entry may belong to several names."""

    def __init__(self, entries: Mapping[str, Iterable[str]]) -> None:
        self._words: dict[str, set[str]] = {}
        self._stems: dict[str, set[str]] = {}
        self._phrases: dict[str, set[str]] = {}  # as they stand in words joined and padded by spaces
        for name, group in entries.items():
            for entry in group:
                if _DENSE.search(entry):
                    self._phrases.setdefault(entry, set()).add(name)
                elif " " in entry.strip():
                    text = f" {entry.strip()}"
                    self._phrases.setdefault(text[:-1] if text.endswith("*") else f"{text} ", set()).add(name)
                elif entry.endswith("*"):
                    self._stems.setdefault(entry[:-1], set()).add(name)
                else:
                    self._words.setdefault(entry.strip(), set()).add(name)
        self._lengths = sorted({len(stem) for stem in self._stems}, reverse=True)
        self._ascii = [phrase for phrase in self._phrases if phrase.isascii()]
        self._by_start: dict[str, list[str]] = {}  # phrases by their first word, or first letter in dense scripts
        for phrase in sorted(self._phrases, key=len, reverse=True):
            self._by_start.setdefault(_start(phrase.split()[0]), []).append(phrase)

    def _word(self, word: str) -> set[str] | None:
        found = self._words.get(word)
        if found:
            return found
        for length in self._lengths:
            found = self._stems.get(word[:length])
            if found:
                return found
        return None

    def counts(self, found: list[str]) -> dict[str, int]:
        """How many different entries of each name occur in a text of these words."""
        counts: dict[str, int] = {}
        joined = f" {' '.join(found)} "
        hyphened = [part for word in found if "-" in word for part in word.split("-")]
        matched = [self._word(word) or () for word in {*found, *hyphened}]
        likely = self._ascii if joined.isascii() else self._phrases
        matched += [self._phrases[phrase] for phrase in likely if phrase in joined]
        for names in matched:
            for name in names:
                counts[name] = counts.get(name, 0) + 1
        return counts

    def first(self, found: list[str]) -> frozenset[str]:
        """Names of the entry that a text of these words begins with, the longest entry deciding."""
        if not found:
            return frozenset()
        joined = f"{' '.join(found[:8])} "
        for phrase in self._by_start.get(_start(found[0]), ()):
            if joined.startswith(phrase.lstrip()):
                return frozenset(self._phrases[phrase])
        return frozenset(self._word(found[0]) or ())


def _start(word: str) -> str:
    return word[0] if _DENSE.match(word) else word


class Lexicon:
    """What is known about words, and the few questions asked of it."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.openers = Table(data["openers"])
        self.words = Table(data["words"])
        phrases = data["phrases"]
        self.agreement = frozenset(phrases["agreement"])
        self.assent = frozenset(phrases["assent"])
        self.greeting = frozenset(phrases["greeting"])
        self._agreement_dense = _dense(phrases["agreement_unspaced"])
        self._greeting_dense = _dense(phrases["greeting_unspaced"])
        spaced = [entry for entry in phrases["courtesy"] if not _DENSE.search(entry)]
        dense = [entry for entry in phrases["courtesy"] if _DENSE.search(entry)]
        alternatives = "|".join(map(re.escape, sorted(spaced, key=len, reverse=True)))
        self._courtesy = re.compile(
            rf"(?:(?:{alternatives})(?:[\s,:]+|$)|(?:{'|'.join(dense)})[,，:：\s]*)+", re.IGNORECASE
        )

    def opening(self, sentence: str) -> frozenset[str]:
        """Names of the openers that a sentence begins with, words of courtesy and order passed over; empty = none."""
        bare = sentence[:80].lstrip(" \t\"'“”¿¡*_-–—•#")
        skipped = self._courtesy.match(bare)
        rest = bare[skipped.end() :] if skipped else bare
        return self.openers.first(words(rest)) or (self.openers.first(words(bare)) if skipped else frozenset())

    def agrees(self, text: str) -> bool:
        """Whether a turn says no more than yes, go on, or which of the options."""
        if len(text) > 120:
            return False
        if self._agreement_dense.fullmatch(text.strip()):
            return True
        found = words(text)
        if not 0 < len(found) <= 12:
            return False
        choice = len(found) == 1 and len(found[0]) == 1
        known = all(word in self.agreement or word.isdigit() for word in found)
        return known and (choice or found[0].isdigit() or any(word in self.assent for word in found))

    def greets(self, text: str) -> bool:
        """Whether a turn is a greeting or thanks."""
        if len(text) > 80:
            return False
        found = words(text)
        return bool(found) and (
            all(word in self.greeting for word in found) or self._greeting_dense.fullmatch(text.strip()) is not None
        )


def _dense(entries: list[str]) -> re.Pattern[str]:
    alternatives = "|".join(map(re.escape, sorted(entries, key=len, reverse=True)))
    return re.compile(rf"(?:(?:{alternatives})[\s,，、.。!！~]*){{1,6}}")


@cache
def lexicon() -> Lexicon:
    """The one of this package."""
    return Lexicon(tomllib.loads((resources.files(__package__) / "lexicon.toml").read_text("utf-8")))
