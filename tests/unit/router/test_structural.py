"""Taking requests apart by their form: what is split, what never is, and what each part then needs."""

import tomllib
from pathlib import Path

import pytest

from contracts.routing import Demand
from router.chat import Message
from router.decomposition.plan import Kind
from router.decomposition.planner import plan
from router.settings import PlanSettings
from router.verification.check import Check
from tests.unit.router.talks import assistant, request

TABLE = tomllib.loads((Path(__file__).parent / "requests.toml").read_text("utf-8"))
LIST = 'Please do the following:\n1. Write a haiku about rain.\n2. Translate "cat" to French.\n3. Explain what DNS is.'


def parts_of(text: str) -> int:
    made = plan(request(text))
    return 1 if made.whole else len(made.subtasks)


@pytest.mark.parametrize("row", TABLE["tuned"], ids=lambda row: row["text"][:40])
def test_requests_that_it_was_tuned_on(row):
    assert parts_of(row["text"]) == row["parts"]


def test_precision_and_recall_on_requests_it_was_not_tuned_on():
    """A request wrongly taken apart loses its answer; one wrongly left whole loses a few cents."""
    found = [(row["parts"], parts_of(row["text"])) for row in TABLE["held_out"]]
    split = [(wanted, got) for wanted, got in found if got > 1]
    precision = sum(wanted == got for wanted, got in split) / len(split)
    recall = len(split) / sum(wanted > 1 for wanted, _ in found)
    assert precision == 1.0, [
        row["text"] for row, (wanted, got) in zip(TABLE["held_out"], found, strict=True) if got > wanted
    ]
    assert recall >= 0.9, recall


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": ("Bash",)},
        {"choices": 2},
        {"json_mode": True},
        {"json_mode": True, "schema": {"type": "object"}},
        {"logprobs": True},
        {"stop": ["\n\n"]},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_object"}},
        {"max_tokens": 300},
    ],
    ids=str,
)
def test_requests_whose_fields_want_one_answer_stay_whole(fields):
    assert not plan(request(LIST)).whole
    assert plan(request(LIST, **fields)).whole


@pytest.mark.parametrize(
    "messages",
    [
        [LIST, assistant("Here you are."), "Thanks, again please"],
        ["hello", assistant("hello"), LIST],
        [Message("user", LIST, images=1)],
        [LIST, Message("assistant", "", tool_calls=("Read",), arguments=("{}",)), Message("tool", "text")],
        ["x" * 20_000 + "\n" + LIST],
        ["Answer:\n" + "\n".join(f"{n}. What is {n}?" for n in range(1, 40))],
    ],
    ids=["answered", "later turn", "image", "agent", "long", "too many"],
)
def test_conversations_images_agents_and_large_requests_stay_whole(messages):
    assert plan(request(*messages)).whole


def test_a_system_message_does_not_keep_a_request_whole():
    assert len(plan(request(Message("system", "Be brief."), LIST)).subtasks) == 3


def test_injected_text_is_not_taken_apart():
    noise = f"<system-reminder>{LIST}</system-reminder>"
    assert plan(request(noise + "What is a mutex, and how does it differ from a semaphore?")).whole


def test_none_never_takes_apart():
    assert plan(request(LIST), PlanSettings(planner="none")).whole


def test_bounds_keep_a_request_whole():
    assert plan(request(LIST), PlanSettings(subtasks=2)).whole
    chain = (
        "Do these tasks:\n1. List three fruits.\n2. Explain DNS to a child.\n3. Using the result of 1, write a haiku.\n"
        "4. Translate the result of 3 to French."
    )
    assert [subtask.inputs for subtask in plan(request(chain)).subtasks] == [(), (), ("s1",), ("s3",)]
    assert plan(request(chain), PlanSettings(depth=2)).whole


@pytest.mark.parametrize(
    ("second", "inputs"),
    [
        ("Write a tweet announcing it.", ("s1",)),
        ("Explain the slogan.", ("s1",)),
        ("Explain what a slogan is.", ()),
        ("Write a Python function that takes a list of numbers and returns it in reverse.", ()),
    ],
)
def test_a_part_needs_what_it_speaks_of_as_known(second, inputs):
    made = plan(request(f"Do these tasks:\n1. Write a slogan for a bakery.\n2. {second}\n3. List three rivers."))
    assert [subtask.inputs for subtask in made.subtasks] == [(), inputs, ()]


def test_parts_know_what_they_need():
    made = plan(
        request(
            "Do these tasks:\n1. Write a Python function that parses dates.\n2. Write unit tests for it.\n"
            "3. Prove that 7 is prime.\n4. Summarize all of the above."
        )
    )
    assert [(each.name, each.kind, each.demand, each.inputs) for each in made.subtasks] == [
        ("s1", Kind.CODE, Demand.MECHANICAL, ()),
        ("s2", Kind.TESTS, Demand.MECHANICAL, ("s1",)),
        ("s3", Kind.PROOF, Demand.DEEP, ()),
        ("s4", Kind.SUMMARY, Demand.MECHANICAL, ("s1", "s2", "s3")),
    ]
    assert made.subtasks[0].check == Check("python")
    assert (made.planner, made.join) == ("structural", "concatenate")
    assert made.titles["s2"] == "2. Write unit tests for it"


def test_what_parts_share_is_said_once_in_each():
    made = plan(
        request(
            "Our shop sells tea.\n```python\ndef price(w):\n    return 3 * w\n```\nPlease do the following:\n"
            "1. Explain the code.\n2. Write unit tests for it.\n\nKeep it short."
        )
    )
    for subtask in made.subtasks:
        for shared in ("Our shop sells tea.", "def price(w):", "Keep it short."):
            assert subtask.prompt.count(shared) == 1
        assert "Please do the following" not in subtask.prompt
    assert "Explain the code" not in made.subtasks[1].prompt
    assert made.subtasks[1].check == Check("tests", {"subject": "def price(w):\n    return 3 * w"})


@pytest.mark.parametrize(
    ("announcement", "kept"),
    [
        ("Answer these questions about my wife's birthday:", True),
        ("Complete these tasks in French:", True),
        ("I have two questions, answer briefly:", True),
        ("Ich habe zwei Fragen zu meinem Golf:", True),
        ("Please answer the following questions:", False),
        ("Can you help me with these two unrelated things?", False),
        ("Bitte beantworte folgende Fragen:", False),
        ("Réponds aux questions suivantes :", False),
        ("Responde las siguientes preguntas:", False),
        ("Ответь на следующие вопросы:", False),
    ],
)
def test_an_announcement_is_dropped_unless_it_says_more(announcement, kept):
    """What the questions are about, or how to answer them, is each part's to know."""
    made = plan(request(f"{announcement}\n1. What should be eaten?\n2. What should be sung?"))
    assert len(made.subtasks) == 2
    assert all((announcement in subtask.prompt) is kept for subtask in made.subtasks)


def test_questions_in_a_row_know_what_their_announcement_says():
    made = plan(request("I have some questions about cars. What is a clutch? What is a gearbox? What is a camshaft?"))
    assert [subtask.prompt for subtask in made.subtasks] == [
        f"I have some questions about cars.\n\nWhat is a {part}?" for part in ("clutch", "gearbox", "camshaft")
    ]


def test_much_shared_context_keeps_a_request_whole():
    passage = "The river was wide. " * 300
    assert plan(
        request(f"{passage}\n\nAnswer these questions:\n1. Who is the hero?\n2. What is the river called?")
    ).whole


def test_each_file_gets_its_own_subtask_and_no_other_file():
    text = "Add docstrings to each of these files.\n\n" + "\n\n".join(
        f"`{name}.py`\n```python\ndef {name}():\n    return '```'\n```" for name in ("one", "two")
    )
    made = plan(request(text))
    assert list(made.titles.values()) == ["one.py", "two.py"]
    assert "def one" in made.subtasks[0].prompt
    assert "def two" not in made.subtasks[0].prompt


def test_making_one_thing_of_the_answers_is_a_models_work():
    made = plan(request(LIST + "\n\nFinally, combine everything into a single letter."))
    assert made.join == "model"
    assert not any("combine" in subtask.prompt for subtask in made.subtasks)


@pytest.mark.parametrize(
    ("text", "check"),
    [
        ("What is 17 * 23?", Check("arithmetic", {"expression": "17 * 23"})),
        ("Calculate (3 + 4) × 2,000", Check("arithmetic", {"expression": "(3 + 4) * 2000"})),
        ("Was ist 12 + 30?", Check("arithmetic", {"expression": "12 + 30"})),
        ("计算 12 * 12", Check("arithmetic", {"expression": "12 * 12"})),
        ("What happened in 1914-1918?", None),
        ("Is 2 + 2 = 5 a famous quotation from a novel?", None),
        ("Call 555-123-4567", None),
        ("Write a Python function that adds numbers. Reply with only the code.", Check("python")),
        ("Write a Go function that adds numbers", None),
        ("Write a bash script that counts files", Check("shell")),
        ("Write a SQL query for all users", Check("sql")),
        ("Convert this to YAML: a=1", Check("yaml")),
        ("Extract the names as JSON: Ann met Bob", Check("json")),
        ("Explain what JSON is", None),
        ("Build a Python compiler with a lexer, parser, optimizer, and linker", None),
        ("Write a poem about Python", None),
    ],
)  # fmt: skip
def test_whole_requests_are_checked_where_their_answer_can_be(text, check):
    made = plan(request(text))
    assert made.whole
    assert made.subtasks[0].check == check


def test_tests_in_the_request_judge_the_answer_however_hard_it_is():
    tests = "def test_f():\n    assert f(2) == 4"
    made = plan(request(f"Fix this bug, why does it fail? Implement f so that these pass:\n```python\n{tests}\n```"))
    assert made.subtasks[0].check == Check("tests", {"code": tests})


def test_old_code_beside_tests_does_not_judge_the_answer():
    block = "def f(x):\n    return x\n\ndef test_f():\n    assert f(2) == 4"
    assert plan(request(f"Fix this bug:\n```python\n{block}\n```")).subtasks[0].check is None


def test_a_diff_is_checked_against_the_files_that_were_shown():
    made = plan(request("Rename x to y and reply with a unified diff.\n\n`a.py`\n```python\nx = 1\n```"))
    assert made.subtasks[0].check == Check("diff", {"files": {"a.py": "x = 1\n"}})


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"json_mode": True}, Check("json", {"bare": True})),
        (
            {"json_mode": True, "schema": {"type": "object"}},
            Check("schema", {"schema": {"type": "object"}, "bare": True}),
        ),
        ({"choices": 2}, None),
    ],
)
def test_the_response_format_is_checked(fields, check):
    assert plan(request("Name a city", **fields)).subtasks[0].check == check


def test_a_check_that_its_verifier_cannot_use_is_left_out():
    assert plan(request("Name a city", json_mode=True, schema={"type": object()})).subtasks[0].check is None


@pytest.mark.parametrize(
    ("name", "judges"), [("tests", True), ("arithmetic", True), ("python", False), ("tool_call", False)]
)
def test_only_checks_that_tell_right_from_wrong_judge(name, judges):
    assert Check(name).judges is judges
