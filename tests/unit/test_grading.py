"""Extraction, equivalence and what a verdict means; the same functions run in the sandbox in production."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts.messages import Finish, Outcome
from infra.grading import Grader, entries, extract, numbers
from infra.grading.grader import known, settle
from infra.grading.verifiers import exact, grade, letters, number
from infra.sandbox import Limits, Sandbox, SandboxCrash, SandboxTimeout


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"\boxed{1}. Wait, actually \boxed{2}.", "2"),
        (r"so \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\boxed{2}}", "2"),
        (r"\boxed{3} and then \boxed{4", "3"),
        (r"} \boxed {5}", "5"),
        (r"\fbox{6}", "6"),
        ("<answer> 7 </answer>", "7"),
        ("<answer>7</answer> no, <answer>8</answer>", "8"),
        (r"<answer>so \boxed{9}</answer>", "9"),
        ("<answer>7", None),
        ("7</answer>", None),
        ("reasoning\n#### 1,234", "1,234"),
        ("Answer: 12\n", "12"),
        ("**Answer:** 12", "12"),
        ("the final answer is: 12", "12"),
        ("Answer: 1\nAnswer: 2", "2"),
        ("<think>Answer: 3</think>Answer: 4", "4"),
        ("<think>Answer: 3", None),
        ("<think>a</think>Answer: 5 <think> Answer: 6", None),
        ("no mark here", None),
        ("", None),
    ],
)
def test_the_marked_answer_is_found(completion: str, answer: str | None) -> None:
    assert extract.marked_answer(completion) == answer


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1234", "1,234"),
        ("1{,}234", "1,234"),
        ("1 234 567", "1234567"),
        ("0.5", "1/2"),
        (r"\frac12", "0.5"),
        (r"\dfrac{1}{2}", ".5"),
        (r"-\frac{3}{4}", "-0.75"),
        (r"2\frac{1}{2}", "2.5"),
        ("2 1/2", "2.5"),
        ("5", r"5\text{ cm}"),
        ("5", "5 cm"),
        ("5", "5 square meters"),
        ("5", "5 cm^2"),
        ("5", "5 km/h"),
        ("90", r"90^\circ"),
        ("5", "$5"),
        ("5", r"\$5.00"),
        ("5", "$5$"),
        ("5", "x = 5"),
        ("5", "2 + 3 = 5"),
        ("5", "**5**"),
        ("5", "5."),
        ("5", r"\(5\)"),
        ("50", "50%"),
        ("0.5", "50%"),
        ("50%", r"50\%"),
        ("3000000", "3 million"),
        ("1500", "1.5e3"),
        ("1500", r"1.5 \times 10^{3}"),
        ("-3", "−3"),
        ("0.333333333333", "1/3"),
        ("13", "١٣"),
        ("7" * 3000, "7" * 3000),
    ],
)
def test_the_same_number(left: str, right: str) -> None:
    first, second = numbers.parse(left), numbers.parse(right)
    assert first and second and numbers.same(first, second) and numbers.same(second, first)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("1/2", "1/3"),
        ("1000000000000", "1000000000001"),
        ("50%", "5000%"),
        ("5", "-5"),
        ("0.3333", "1/3"),
        ("5 million", "5"),
        ("1e3", "1e4"),
    ],
)
def test_different_numbers(left: str, right: str) -> None:
    first, second = numbers.parse(left), numbers.parse(right)
    assert first and second and not numbers.same(first, second)


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "9^{9^{9}}", "9**9**9", "1/2004!", "5!", "5 or 6", "5x", "5i", "2 pi", "1/0", r"\frac{1}{0}", "1,23",
        "1.2.3", "--5", "5k", "5 dozen", '__import__("os").system("id")', "1e99999", "9" * 5000, r"5\sqrt{2}", "nan",
        "inf", "0x10", "1_000", "\ud800", "5 6",
    ],
)  # fmt: skip
def test_no_number(text: str) -> None:
    assert numbers.parse(text) is None


@given(st.text(alphabet="0123456789.,+-/\\{}frac%$^ eE=\ud800x", max_size=60))
def test_parsing_never_raises(text: str) -> None:
    numbers.parse(text)
    numbers.last_standalone(text)
    extract.answer(text)


@given(st.fractions())
def test_a_fraction_equals_its_own_text(value: Any) -> None:
    parsed = numbers.parse(str(value))
    assert parsed is not None and parsed.value == value


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        (" 37\n", "37", "ok"),
        (" 37.", "37", "ok"),
        (" Odd", "odd", "ok"),
        ("  the   Answer", "The answer", "ok"),
        ("Answer: Paris", "paris", "ok"),
        (r"\boxed{\varnothing}", r"\emptyset", "ok"),
        (r"1/2006!", r"1/2004!", "wrong"),
        ("INCORRECT", "CORRECT", "wrong"),
        ("37 38", "37", "wrong"),
        ("9**9", "99", "wrong"),
        ("38", "37", "wrong"),
        ("", "37", "no_answer"),
        (" \n", "37", "no_answer"),
        ("<think>37", "37", "no_answer"),
    ],
)
def test_exact(completion: str, gold: str, outcome: str) -> None:
    verdict = exact(completion, gold)
    assert (verdict["outcome"], verdict["reward"]) == (outcome, float(outcome == "ok"))


@pytest.mark.parametrize(
    ("completion", "outcome", "reward", "complete"),
    [
        ("fedcba\n", "ok", 1.0, True),
        ("fedcbx", "wrong", 5 / 6, True),
        ("fedcbaa", "wrong", 6 / 7, True),
        ("fed", "wrong", 0.5, False),
        ("abcdef", "wrong", 0.0, True),
        ("\n", "no_answer", 0.0, False),
    ],
)
def test_letters(completion: str, outcome: str, reward: float, complete: bool) -> None:
    verdict = letters(completion, "fedcba")
    assert (verdict["outcome"], verdict["complete"]) == (outcome, complete)
    assert verdict["reward"] == pytest.approx(reward)


@pytest.mark.parametrize(
    ("completion", "gold", "outcome"),
    [
        (r"\boxed{1}. Wait, actually \boxed{2}.", "2", "ok"),
        ("1,234", "1{,}234", "ok"),
        (r"5\text{ cm}", "5", "ok"),
        ("0.5", r"\frac12", "ok"),
        ("so I get 12.", "12", "ok"),
        ("the total is **12** apples", 12, "ok"),
        ("It costs $3.50 in all", 3.5, "ok"),
        (r"\boxed{9^{9^{9}}}", "1", "wrong"),
        (r"\boxed{9^{9^{9}}}", "9", "wrong"),
        ("9**9**9", "9", "no_answer"),
        ("9^{9^{9}}", "9", "no_answer"),
        ("3*5", "5", "no_answer"),
        ("Answer: 5 or 6", "5", "wrong"),
        (r"\boxed{}", "5", "no_answer"),
        ("I do not know", "5", "no_answer"),
        ("\ud800 7", "7", "ok"),
    ],
)
def test_number(completion: str, gold: Any, outcome: str) -> None:
    verdict = number(completion, gold)
    assert (verdict["outcome"], verdict["reward"]) == (outcome, float(outcome == "ok"))


def test_a_gold_that_is_no_number_is_the_verifiers_failure() -> None:
    with pytest.raises(ValueError, match="not a number"):
        number("5", "five")


@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{" * 200_000,
        "<answer>" * 200_000,
        "{" * 1_000_000,
        "9" * 1_000_000,
        "1," * 500_000,
        "111,111," * 100_000 + "x",
        "111 111 " * 100_000 + "x",
        "answer is " * 100_000,
        "(" * 1_000_000,
        "=" * 1_000_000,
        "\n" * 1_000_000,
        "####" * 250_000,
    ],
)
def test_a_megabyte_is_judged_in_linear_time(text: str) -> None:
    # quadratic work on these would take minutes; the suite's own limit is what fails
    requests = [{"verifier": name, "completion": text, "expected": "7"} for name in ("exact", "letters", "number")]
    assert all(verdict["outcome"] != "ok" for verdict in grade(requests))


WRONG = {"outcome": "wrong", "reward": 0.5, "parts": {"letters": 0.5}, "complete": False}


@pytest.mark.parametrize(
    ("verdict", "finish", "outcome", "reward"),
    [
        (WRONG, Finish.STOP, Outcome.WRONG, 0.5),
        (WRONG, Finish.LENGTH, Outcome.TRUNCATED, 0.0),
        (WRONG | {"complete": True}, Finish.LENGTH, Outcome.WRONG, 0.5),
        (WRONG | {"outcome": "ok", "reward": 1.0}, Finish.LENGTH, Outcome.OK, 1.0),
        (WRONG | {"outcome": "no_answer", "reward": 0.0}, Finish.STOP, Outcome.NO_ANSWER, 0.0),
        (WRONG | {"outcome": "no_answer", "reward": 0.0}, Finish.LENGTH, Outcome.TRUNCATED, 0.0),
        (WRONG | {"reward": 1.5}, Finish.STOP, Outcome.VERIFIER_ERROR, None),
        (WRONG | {"reward": "x"}, Finish.STOP, Outcome.VERIFIER_ERROR, None),
        (WRONG | {"outcome": "splendid"}, Finish.STOP, Outcome.VERIFIER_ERROR, None),
        (WRONG | {"parts": None}, Finish.STOP, Outcome.VERIFIER_ERROR, None),
        ({}, Finish.STOP, Outcome.VERIFIER_ERROR, None),
        (None, Finish.STOP, Outcome.VERIFIER_ERROR, None),
    ],
)
def test_a_verdict_is_read_in_the_light_of_how_sampling_ended(
    verdict: Any, finish: str, outcome: Outcome, reward: float | None
) -> None:
    grade = settle(verdict, finish)
    assert (grade.outcome, grade.reward) == (outcome, reward)


@pytest.mark.parametrize("name", ["exact", "letters", "number", "gym:basic_arithmetic"])
def test_known_verifiers(name: str) -> None:
    assert known(name) and not known(name.upper())


class OneProcess(Sandbox):
    """Calls the sandbox entry in this process; fails for a batch that contains `poison`, as a killed call does."""

    def __init__(self, poison: str, error: Exception) -> None:
        super().__init__(1, Limits())
        self.batches: list[int] = []
        self._poison, self._error = poison, error

    async def call(self, function: str, payload: Any, *, limits: Limits | None = None) -> Any:
        await asyncio.sleep(0)
        self.batches.append(len(payload))
        if any(request["completion"] == self._poison for request in payload):
            raise self._error
        return grade(payload)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (SandboxTimeout("too long"), Outcome.VERIFIER_TIMEOUT),
        (SandboxCrash("out of memory"), Outcome.VERIFIER_ERROR),
    ],
)
async def test_completions_are_judged_together_and_none_suffers_from_another(
    error: Exception, outcome: Outcome
) -> None:
    sandbox = OneProcess("poison", error)
    grader = Grader(sandbox, 1.0)
    groups = [["7", "8", "poison" if number == 5 else "7", "7"] for number in range(25)]
    grades = await asyncio.gather(*(grader.grade("exact", group, "7", [Finish.STOP] * 4) for group in groups[6:]))
    assert all([grade.reward for grade in group] == [1.0, 0.0, 1.0, 1.0] for group in grades)
    assert len(sandbox.batches) == 2, "76 completions of many groups, at most 64 in a call"
    grades = await asyncio.gather(*(grader.grade("exact", group, "7", [Finish.STOP] * 4) for group in groups))
    rewards = [[grade.reward for grade in group] for group in grades]
    assert rewards == [[1.0, 0.0, None if number == 5 else 1.0, 1.0] for number in range(25)]
    assert (grades[5][2].outcome, grades[5][2].reason) == (outcome, str(error))


async def test_a_group_without_members_asks_nobody() -> None:
    sandbox = OneProcess("", SandboxCrash(""))
    assert await Grader(sandbox, 1.0).grade("exact", [], "7", []) == []
    assert sandbox.batches == []


async def test_an_unknown_verifier_is_an_error_not_a_score() -> None:
    (grade,) = await Grader(OneProcess("", SandboxCrash("")), 1.0).grade("taste", ["5"], "5", [Finish.STOP])
    assert (grade.outcome, grade.reward) == (Outcome.VERIFIER_ERROR, None)


@pytest.mark.parametrize(
    "entry",
    [
        {"question": "q", "answer": "a", "metadata": {"size": (2, 6), "edges": [(1, 2), (3, 4)]}},
        {"metadata": {"colors": {1: "red", 2: "blue"}, "nested": {(1, 2): None}}},
        {"$tuple": [1], "a": {"$items": 2}},
        {"plain": [1, 2.5, True, None, "text"]},
    ],
)
def test_dataset_entries_survive_as_json(entry: Any) -> None:
    assert entries.unpack(json.loads(json.dumps(entries.pack(entry)))) == entry


def test_an_entry_without_a_json_form_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON form"):
        entries.pack({"a": {1, 2}})
