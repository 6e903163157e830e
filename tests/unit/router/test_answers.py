"""Finding what can be checked in an answer."""

from __future__ import annotations

from fractions import Fraction

import pytest

from router.verification import answers

PYTHON = frozenset({"python", "py"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\na\n```", ["a"]),
        ("```Python title='x.py'\na\n```", ["a"]),
        ("```{.python}\na\n```", ["a"]),
        ("~~~py\na\n~~~", ["a"]),
        ("````python\na\n```\nb\n````", ["a\n```\nb"]),
        ("1. first:\n   ```python\n   if a:\n       b\n   ```", ["if a:\n    b"]),
        ("```bash\nls\n```\n```python\na\n```\n```\nout\n```", ["a"]),
        ("```\na\n```\n```bash\nls\n```", ["a"]),
        ("```python\na\n```\nand\n```py\nb\n```", ["a", "b"]),
        ("so:\n```python\na\nb", ["a\nb"]),
        ("```python\r\na\r\nb\r\n```\r\n", ["a\nb"]),
        ("> ```python\n> a\n> ```", ["a"]),
        ("use ```a``` inline", []),
        ("```a``` inline", []),
        ("```rust\na\n```", []),
        ("no code", []),
        ("", []),
        ("<think>```python\nwrong\n```</think>```python\na\n```", ["a"]),
        ("<think>```python\nstill thinking\n```", []),
    ],
)
def test_code(text: str, expected: list[str]) -> None:
    assert [block.text for block in answers.code(text, PYTHON)] == expected


def test_a_block_knows_its_language_and_needs_no_end() -> None:
    first, second = answers.blocks("src/a.py\n\n```python\nx\n```\nsrc/b.py:\n```\ny")
    assert (first.language, first.text, second.language, second.text) == ("python", "x", "", "y")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        (' [1, 2]\n', "[1, 2]"),
        ("5", "5"),
        ('```json\n{"a": 1}\n```', '{"a": 1}'),
        ('```\nnot it\n```\n```json\n{"a": 1}\n```', '{"a": 1}'),
        ('```json\n{broken\n```\n```json\n{"a": 1}\n```', '{"a": 1}'),
        ('Sure: {"a": {"b": "}"}} there.', '{"a": {"b": "}"}}'),
        ('See [here] and {x} or {"a": "\\"{"}.', '{"a": "\\"{"}'),
        ('It is {"a": 1', '{"a": 1'),
        ("It is {a: 1}.", "{a: 1}"),
        ("Nothing [here].", None),
        ("", None),
    ],
)  # fmt: skip
def test_json(text: str, expected: str | None) -> None:
    assert answers.json_text(text) == expected


def test_bare_json_is_the_whole_answer() -> None:
    assert answers.json_text(' ```json\n{}\n``` ', bare=True) == "```json\n{}\n```"  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42", 42),
        ("2 + 2 = 4", 4),
        ("So 3 apples and 4 pears, 7 in all.", 7),
        ("The answer is 1,234.", 1234),
        ("\\boxed{\\frac{1}{2}} of 10", Fraction(1, 2)),
        ("<think>5</think> 6", 6),
        ("#### 18", 18),
        ("none", None),
        ("", None),
    ],
)
def test_number(text: str, expected: Fraction | None) -> None:
    found = answers.number(text)
    assert (found and found.value) == expected


@pytest.mark.parametrize(
    "piece", ["```", "```\n", "{", '{"', '\\"', '"\\', "[{", "}", "`\n", "~~~ a\n", "> ", "\ud800", "1 ", "=", "#"]
)
def test_any_text_of_a_megabyte_is_read(piece: str) -> None:
    text = piece * (1_000_000 // len(piece))
    for found in (answers.code(text, PYTHON), answers.json_text(text), answers.plain(text)):
        assert found is None or len(found) <= len(text)
