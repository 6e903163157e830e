"""Whatever is asked, planning it ends soon, never raises, and gives a plan that can be run."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat import Message
from router.decomposition.model_made import Refusal, read
from router.decomposition.plan import Plan
from router.decomposition.planner import plan
from router.decomposition.text import clipped, spoken
from router.decomposition.trajectory import follow
from router.settings import PlanSettings
from tests.unit.router.talks import call, request, result

WORDS = st.sampled_from(
    [
        "Write", "a", "function", "Explain", "it", "Translate", "the result", "cat", "What is", "DNS", "?", ". ", ":",
        ", then ", "\n", "\n\n",
        "1. ", "2. ", "3. ", "- ", "a) ", "```", "```python\n", "`a.py`\n", "> ",
        "combine all",
        "Please do the following:", "<system-reminder>", "</system-reminder>", "<task>", "yes", "好的",
        "解释", "17 * 23",
        "\ud800", "\x00",
    ]
)  # fmt: skip
ASKS = st.tuples(st.sampled_from(["Explain ", "Write ", "What is ", "Translate "]), st.text(max_size=20)).map("".join)
LISTS = st.lists(ASKS, min_size=2, max_size=9).map(
    lambda items: "Please do the following:\n" + "\n".join(f"{n}. {item}" for n, item in enumerate(items, 1))
)
ANYTHING = st.text(alphabet=st.characters(codec=None), max_size=300)  # lone surrogates too
TEXTS = st.one_of(st.lists(WORDS, max_size=60).map(" ".join), LISTS, ANYTHING)
TOOLS = st.sampled_from(["Read", "Bash", "str_replace_editor", "", "x" * 300, "\ud800"])
ARGUMENTS = st.sampled_from(["{}", '{"command": "pytest"}', '{"command": ["a"]}', "{", "[1]", "null", ""])
MESSAGES = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool", "developer", "elf"]),
    text=TEXTS,
    images=st.integers(0, 1),
    tool_calls=st.lists(TOOLS, max_size=3).map(tuple),
    arguments=st.lists(ARGUMENTS, max_size=3).map(tuple),
    is_error=st.booleans(),
)


def runnable(made: Plan, bounds: PlanSettings) -> None:
    names = [subtask.name for subtask in made.subtasks]
    assert len(set(names)) == len(names)
    assert 1 <= len(names) <= bounds.subtasks
    depths: dict[str, int] = {}
    for subtask in made.subtasks:
        assert set(subtask.inputs) <= set(depths), (
            "each comes after its inputs, so there is no circle and all are reached"
        )
        depths[subtask.name] = 1 + max((depths[name] for name in subtask.inputs), default=0)
        assert bool(subtask.prompt.strip()) is not made.whole
    assert max(depths.values()) <= bounds.depth
    assert made.whole or set(made.titles) == set(names)


@given(TEXTS, st.integers(2, 8), st.integers(1, 4))
@settings(max_examples=300, deadline=None)
def test_every_plan_can_be_run(text, most, depth):
    bounds = PlanSettings(subtasks=most, depth=depth)
    runnable(plan(request(text), bounds), bounds)


@given(st.lists(MESSAGES, max_size=8), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_conversation_can_be_planned(messages, tools):
    made = plan(request(*messages, tools=("Bash",) if tools else ()))
    runnable(made, PlanSettings())
    assert all(0 <= figure < 1000 for figure in made.trajectory.values())


NAMES = st.sampled_from(["id", "title", "kind", "demand", "prompt", "inputs", "subtasks", "join"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(["s1", "s2", "code", "deep"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=20,
)
WRITTEN = JSON.map(lambda value: {"subtasks": value} if isinstance(value, list) else value).map(json.dumps)


@given(WRITTEN | st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_whatever_a_model_writes_is_a_plan_that_can_be_run_or_a_refusal(text):
    found = read(text, request("Please do one thing and another."), PlanSettings())
    assert isinstance(found, Refusal) or runnable(found, PlanSettings()) is None


@pytest.mark.parametrize(
    "piece",
    [
        "a", "1. Write x\n", "- Explain y?\n", "```\n", "`a.py`\n```\nx\n```\n", "<system-reminder>",
        "<task></system-reminder>", "<system-reminder></system-reminder>", "What is it? ", "(1+", "1, ", "\\", '{"a":',
        "exit code: ", "yes ", "，", "> ", "\ud800", "first, x. ", "***", " ", "\n", "a-", "1 passed", "error: ", '"',
        "`", "Traceback ", "[x for y] Result:",
    ],
)  # fmt: skip
def test_a_megabyte_of_anything_is_planned_in_linear_time(piece):
    """Doubling the text may not quadruple the time; a bound this generous fails only where that is lost."""

    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        talk = request(text, call("Bash", command=text), result(text), text)
        begun = time.process_time()
        plan(request(text))
        plan(talk)
        return time.process_time() - begun

    seconds(1000)  # tables are built once
    assert seconds(1_000_000) < 2.0


@pytest.mark.parametrize("space", [" ", "\t", "\u3000", " ,", ", "])
@pytest.mark.parametrize(
    "text",
    [
        "Explain the code{} x.\n```python\nx=1\n```\nWrite tests for it",
        "Please combine all of it{}.\n1. Explain x\n2. Translate cat",
        "Do these things{}combine all of it:\n1. Explain x\n2. Translate cat to French",
    ],
)
def test_a_long_run_of_spaces_costs_no_more_than_a_text(text, space):
    begun = time.process_time()
    for _ in range(20):
        plan(request(text.format(space * (15_000 // len(space)))))
    assert time.process_time() - begun < 2.0


def test_what_is_looked_at_is_capped():
    assert len(clipped("x" * 1_000_000)) <= 4001
    assert spoken("<system-reminder>" * 50_000 + "hello").endswith("hello")


def test_a_long_session_is_followed():
    talk = [call("Bash", command="pytest"), result("1 failed")] * 2000
    assert follow(talk, tools=True).latched
