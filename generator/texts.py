"""The text of a completion while it is sampled: whole characters only, and nothing of a stop string. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # token ids -> text, special tokens left out

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
CHARACTER_BYTES = 4  # of the longest character in UTF-8
PENDING = 16  # tokens without a clean end of text, after which it is no character that is incomplete


class Detokenizer:
    """Turns tokens into text one by one, as decoding all of them at once would.

    What a token contributes depends on the tokens before it, so the last ones are decoded with it. Bytes of a character
    that is not complete yet are held back; those that never become one are U+FFFD, as in any decoder, except at the
    end: there they are left out.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []  # from the last place but one at which the text ended cleanly
        self._clean = 0  # tokens of these up to the last such place
        self._told = ""  # of their text, what has been given out

    def push(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        unknown = len(text) - len(text.rstrip(UNKNOWN))
        incomplete = min(unknown, CHARACTER_BYTES - 1)  # each byte of an incomplete character may show as one
        damaged = not text.startswith(self._told)  # some decoders show all bytes before an incomplete character so, too
        if len(self._tokens) - self._clean > PENDING:
            incomplete, damaged = 0, False
        if damaged:
            return ""
        new = text[len(self._told) : len(text) - incomplete]
        self._told += new
        if not incomplete and text:
            self._tokens = self._tokens[self._clean :]
            self._clean = len(self._tokens)
            self._told = self._decode(self._tokens)
        return new


class AnswerText:
    """What may be shown of one completion: its text up to a stop string, which is not part of it."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._stops = [stop for stop in stops if stop]
        self._held = ""  # may be the beginning of a stop string
        self._stopped = False

    def push(self, token: int) -> str:
        """The text that can be shown now and could not before."""
        if self._stopped:
            return ""
        self._held += self._detokenizer.push(token)
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self._stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def end(self) -> str:
        """What was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
