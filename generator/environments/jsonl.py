"""A user's own questions: one JSON object a line."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from random import Random
from typing import Any

from contracts.messages import Split
from generator.environments.base import Item, Prompt, make_item, split_of
from infra.errors import UserError
from infra.grading import numbers
from infra.grading.grader import known

MAX_LINE_BYTES = 16 * 1024 * 1024


class Jsonl:
    """Lines `{"prompt": text or "messages": [{role, content}, …], "answer": …, "verifier"?: name}`.

    The default verifier is `number` where the answer is one, else `exact`. The file is read and checked once; only the
    offset of each line stays in memory, so the file must not change during a run.
    """

    def __init__(self, path: str) -> None:
        """Raises `UserError` for a file that cannot be read, and names the first line that is wrong and why."""
        self.name = f"jsonl:{path}"
        self._path = Path(path)
        self._offsets = {split: array("q") for split in Split}
        try:
            with self._path.open("rb") as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._offsets[split_of(self._parse(line, number))].append(offset)
                    offset += len(line)
        except OSError as error:
            raise UserError(f"environment {self.name}: {error.strerror}; give the path of a readable file") from None
        if not any(self._offsets.values()):
            raise UserError(f"environment {self.name}: the file has no lines; write one JSON object a line")

    def item(self, seed: int, split: Split) -> Item:
        """See `Environment.item`: a random line for training, the held-out lines in turn."""
        offsets = self._offsets[split]
        if not offsets:
            raise UserError(f"environment {self.name}: no line is in the split {split.value}; give it more lines")
        place = seed if split is Split.HELDOUT else Random(seed).randrange(len(offsets))
        with self._path.open("rb") as file:
            file.seek(offsets[place % len(offsets)])
            return self._parse(file.readline(), None)

    def _parse(self, line: bytes, number: int | None) -> Item:
        try:
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"longer than {MAX_LINE_BYTES} bytes")
            row = json.loads(line, parse_constant=_refuse_constant)
            if "\\u" in line.decode():
                json.dumps(row, ensure_ascii=False).encode()
            return _item(row)
        except RecursionError:
            reason = "nested too deeply"
        except json.JSONDecodeError as error:
            reason = f"not JSON: {error.msg} at column {error.colno}"
        except UnicodeEncodeError:
            reason = "holds half a surrogate pair, which is not text"
        except ValueError as error:
            reason = str(error)
        where = f"line {number}" if number else "a line that has changed since the start"
        raise UserError(f"environment {self.name}: {where}: {reason}")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name} is not a number there")


def _item(row: Any) -> Item:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, got {type(row).__name__}")
    if ("prompt" in row) == ("messages" in row):
        raise ValueError('needs either "prompt" or "messages"')
    if "answer" not in row or row["answer"] is None:
        raise ValueError('needs "answer"')
    prompt = _prompt(row)
    gold = row["answer"]
    text = gold if isinstance(gold, str) else json.dumps(gold)
    is_number = numbers.parse(text) is not None
    verifier = row.get("verifier", "number" if is_number else "exact")
    if not isinstance(verifier, str) or not known(verifier):
        raise ValueError(f"there is no verifier {verifier!r}")
    if verifier == "number" and not is_number:
        raise ValueError(f"the answer {text[:80]!r} is not a number, which the verifier number needs")
    return make_item(prompt, gold if verifier.startswith("gym:") else text, verifier)


def _prompt(row: dict[str, Any]) -> Prompt:
    if "prompt" in row:
        if not isinstance(row["prompt"], str) or not row["prompt"]:
            raise ValueError('"prompt" must be a text that is not empty')
        return str(row["prompt"])
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list that is not empty')
    for message in messages:
        if not isinstance(message, dict) or {"role", "content"} - message.keys():
            raise ValueError('each of "messages" needs "role" and "content"')
        if not all(isinstance(message[key], str) for key in ("role", "content")):
            raise ValueError('"role" and "content" of "messages" must be texts')
    return [{"role": message["role"], "content": message["content"]} for message in messages]
