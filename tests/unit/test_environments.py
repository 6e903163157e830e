"""Items from seeds: deterministic, split by content, answered rightly, and clear about bad input."""

from __future__ import annotations

import json
import math
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from contracts.messages import Split
from generator.environments import Environment, Item, environment, split_of
from generator.environments.quick_facts import KINDS, Choices, Kind
from infra.errors import UserError
from infra.grading.verifiers import grade


@pytest.fixture(scope="module")
def jsonl_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "questions.jsonl"
    rows = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(200)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.fixture(
    scope="module", params=["reverse-text", "quick-facts", "gym:basic_arithmetic", "jsonl", "tools:0.2:1:quick-facts"]
)
def made(request: pytest.FixtureRequest, jsonl_file: Path) -> Environment:
    return environment(f"jsonl:{jsonl_file}" if request.param == "jsonl" else request.param)


def test_the_name_is_what_it_was_asked_for_by(made: Environment) -> None:
    assert environment(made.name).name == made.name


@pytest.mark.parametrize("split", Split)
def test_a_seed_determines_the_item(made: Environment, split: Split) -> None:
    again = environment(made.name)
    for seed in (0, 1, 7, 10**9, 2**62):
        assert made.item(seed, split) == again.item(seed, split)


def test_no_item_is_on_both_sides(made: Environment) -> None:
    sides = {split: {made.item(seed, split).hash for seed in range(60)} for split in Split}
    assert not sides[Split.TRAIN] & sides[Split.HELDOUT]
    for split in Split:
        assert all(split_of(made.item(seed, split)) is split for seed in range(20))


def test_items_are_json_and_hashed_by_content(made: Environment) -> None:
    items = [made.item(seed, Split.TRAIN) for seed in range(50)]
    assert all(re.fullmatch("[0-9a-f]{16}", item.hash) for item in items)
    assert all(json.loads(json.dumps(item.expected)) == item.expected for item in items)
    contents = {json.dumps([item.prompt, item.expected]) for item in items}
    assert len(contents) == len({item.hash for item in items}) > 25


def judged(item: Item, completion: str) -> str:
    return grade([{"verifier": item.verifier, "completion": completion, "expected": item.expected}])[0]["outcome"]


def test_quick_facts_ask_as_shown_and_know_the_answer() -> None:
    made = environment("quick-facts")
    for seed in range(300):
        item = made.item(seed, Split.TRAIN)
        assert isinstance(item.prompt, str)
        *shown, question, end = item.prompt.split("\n")
        assert end == "A:" and [line[:2] for line in shown] == ["Q:", "A:", "Q:", "A:"]
        assert question not in shown
        assert judged(item, f" {item.expected}\n") == "ok" and judged(item, " none\n") == "wrong"


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        (r"Which is larger, (\d+) or (\d+)\?", lambda a, b: str(max(int(a), int(b)))),
        (r"Is (\d+) even or odd\?", lambda n: ("even", "odd")[int(n) % 2]),
        (r"What is the first letter of (\w+)\?", lambda word: word[0]),
        (r"Which number is in the middle: (\d+), (\d+), (\d+)\?", lambda *all: all[1]),
        (r"Which word is in the middle: (\w+), (\w+), (\w+)\?", lambda *all: all[1]),
        (r"(\w+), (\w+) and (\w+) stand in line. Who is in the middle\?", lambda *all: all[1]),
        (r"(\w+), (\w+) and (\w+) stand in line. Who is last\?", lambda *all: all[2]),
    ],
)
def test_quick_facts_are_facts(pattern: str, answer) -> None:
    made = environment("quick-facts")
    prompts = [
        (str(item.prompt), item.expected) for item in (made.item(n, Split.TRAIN) for n in range(20 * len(KINDS)))
    ]
    matching = [(re.search(pattern + r"\nA:$", prompt), expected) for prompt, expected in prompts]
    found = [(match, expected) for match, expected in matching if match]
    assert len(found) == 20
    assert all(answer(*match.groups()) == expected for match, expected in found)


@pytest.mark.parametrize("split", Split)
def test_the_first_hundreds_of_quick_facts_are_all_different(split: Split) -> None:
    made = environment("quick-facts")
    assert len({made.item(seed, split).hash for seed in range(480)}) == 480


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_thousands_of_questions(kind: Kind) -> None:
    counted = Choices(0)
    kind(counted)
    assert counted.size > 5000
    assert len({kind(Choices(index)) for index in range(0, counted.size, counted.size // 1000)}) >= 1000


def test_held_out_questions_are_never_shown_in_training() -> None:
    made = environment("quick-facts")
    asked = {str(made.item(seed, Split.HELDOUT).prompt).split("\n")[-2] for seed in range(300)}
    shown = {
        line for seed in range(1500) for line in str(made.item(seed, Split.TRAIN).prompt).split("\n") if line[0] == "Q"
    }
    assert not asked & shown


def test_reverse_text_is_reversed() -> None:
    made = environment("reverse-text")
    for seed in range(50):
        item = made.item(seed, Split.TRAIN)
        assert isinstance(item.prompt, str) and re.fullmatch("[a-z]{6}>", item.prompt)
        assert item.expected == item.prompt[5::-1] and judged(item, f"{item.expected}\n") == "ok"


def test_gym_items_are_chats_that_carry_their_entry() -> None:
    item = environment("gym:basic_arithmetic").item(3, Split.TRAIN)
    assert isinstance(item.prompt, list) and [message["role"] for message in item.prompt] == ["system", "user"]
    assert item.prompt[1]["content"] == item.expected["question"]
    assert item.verifier == "gym:basic_arithmetic"


def test_jsonl_lines_choose_their_verifier(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [
        ({"prompt": "1+1?", "answer": "2"}, "number", "2"),
        ({"prompt": "1+1?", "answer": 2}, "number", "2"),
        ({"prompt": "Capital?", "answer": "Paris"}, "exact", "Paris"),
        ({"prompt": "Say 2", "answer": "2", "verifier": "exact"}, "exact", "2"),
        ({"messages": [{"role": "user", "content": "hi"}], "answer": "hello"}, "exact", "hello"),
    ]
    for row, verifier, expected in rows:
        path.write_text("\n" + json.dumps(row) + "\n\n")
        made = environment(f"jsonl:{path}")
        item = next(item for split in Split if (item := _item_or_none(made, split)))
        assert (item.prompt, item.verifier, item.expected) == (
            row.get("prompt", row.get("messages")),
            verifier,
            expected,
        )


def _item_or_none(made: Environment, split: Split) -> Item | None:
    try:
        return made.item(0, split)
    except UserError as error:
        assert "no line is in the split" in str(error)
        return None


def test_held_out_lines_come_in_turn(jsonl_file: Path) -> None:
    made = environment(f"jsonl:{jsonl_file}")
    hashes = [made.item(seed, Split.HELDOUT).hash for seed in range(200)]
    count = len(set(hashes))
    assert 5 <= count <= 40 and len(set(hashes[:count])) == count


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "q", "answer": }', "line 3: not JSON"),
        ("\xff".encode("latin1"), "line 3: "),
        ("[1, 2]", "line 3: expected an object"),
        ('{"answer": 1}', 'needs either "prompt" or "messages"'),
        ('{"prompt": "q", "messages": [], "answer": 1}', 'needs either "prompt" or "messages"'),
        ('{"prompt": "q"}', 'needs "answer"'),
        ('{"prompt": "", "answer": 1}', '"prompt" must be a text'),
        ('{"messages": [{"role": "user"}], "answer": 1}', 'needs "role" and "content"'),
        ('{"messages": "hi", "answer": 1}', '"messages" must be a list'),
        ('{"prompt": "q", "answer": "a", "verifier": "taste"}', "there is no verifier 'taste'"),
        ('{"prompt": "q", "answer": "a", "verifier": "number"}', "is not a number"),
        ("[" * 100_000, "line 3: "),
        ('{"prompt": "q", "answer": NaN}', "not JSON: NaN"),
        ('{"prompt": "\\ud800 hi", "answer": "a"}', "half a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str | bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    good = b'{"prompt": "q", "answer": 1}\n\n'
    path.write_bytes(good + (line if isinstance(line, bytes) else line.encode()) + b"\n")
    with pytest.raises(UserError) as caught:
        environment(f"jsonl:{path}")
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("poetry", "known are reverse-text, quick-facts, gym, jsonl"),
        ("", "known are"),
        ("quick-facts:hard", "nothing may follow"),
        ("gym", "needs a task"),
        ("gym:", "needs a task"),
        ("gym:basic_arithmetics", "did you mean basic_arithmetic"),
        ("gym:composite", "cannot make an item"),
        ("jsonl:", "needs a path"),
        ("jsonl:/nowhere/at/all.jsonl", "No such file"),
        ("jsonl:/", "directory"),
    ],
)
def test_a_wrong_name_is_one_clear_sentence(spec: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        environment(spec)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_the_bus_names_reads_no_file_of_this_machine(jsonl_file: Path) -> None:
    for path in (jsonl_file, "/dev/zero"):
        with pytest.raises(UserError, match=r"only if it is the one of run\.environment"):
            environment(f"jsonl:{path}", files=False)
    assert environment("reverse-text", files=False).item(1, Split.TRAIN).prompt


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n \n")
    with pytest.raises(UserError, match="has no lines"):
        environment(f"jsonl:{path}")


def test_a_tool_waits_the_same_time_for_the_same_rollout_and_spreads_as_asked() -> None:
    made, plain = environment("tools:0.2:0.5:reverse-text"), environment("reverse-text")
    items = [made.item(seed, Split.TRAIN) for seed in range(100)]
    waits = [item.tool.seconds(index) for item in items for index in range(40) if item.tool is not None]
    again = [made.item(seed, Split.TRAIN).tool for seed in range(100)]
    assert waits == [tool.seconds(index) for tool in again for index in range(40) if tool is not None]
    assert statistics.median(waits) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(map(math.log, waits)) == pytest.approx(0.5, rel=0.05)
    assert [replace(item, tool=None) for item in items] == [plain.item(seed, Split.TRAIN) for seed in range(100)]


def test_the_tail_of_a_tool_has_an_end() -> None:
    item = environment("tools:600:5:reverse-text").item(1, Split.TRAIN)
    assert item.tool is not None and max(item.tool.seconds(index) for index in range(50)) == 600.0


@pytest.mark.parametrize(
    "spec",
    [
        "tools", "tools:", "tools:0.2", "tools:0.2:1", "tools:0.2:1:", "tools:slow:1:reverse-text",
        "tools:0:1:reverse-text", "tools:nan:1:reverse-text", "tools:inf:1:reverse-text", "tools:0.2:-1:reverse-text",
        "tools:0.2:nan:reverse-text", "tools:0.2:1:nowhere", "tools:0.2:1:tools:0.2:1:reverse-text",
    ],
)  # fmt: skip
def test_a_tool_that_makes_no_sense_is_refused(spec: str) -> None:
    with pytest.raises(UserError, match=re.escape(spec.partition(":")[0])):
        environment(spec)


def test_a_tool_does_not_hide_a_file_from_the_rule_about_files(jsonl_file: Path) -> None:
    with pytest.raises(UserError, match="may name a file only"):
        environment(f"tools:0.2:1:jsonl:{jsonl_file}", files=False)
