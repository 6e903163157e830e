"""What a request is about: from what a person said, whatever hosts wrapped around it."""

import pytest

from contracts.routing import Demand
from router.decomposition.kinds import read, understand
from router.decomposition.plan import Kind
from router.decomposition.text import parts, spoken
from tests.unit.router.talks import assistant, user

DEEP, MECHANICAL = Demand.DEEP, Demand.MECHANICAL

REMINDER = (
    "<system-reminder>\nDesign documents live in /docs. Prove every theorem. Debug the crash with a stack trace:\n"
    "Traceback (most recent call last): ...\n</system-reminder>"
)
DESIGN = "Design a distributed payment platform with replication, failover and audit logging."
PLAN = "Here is my plan:\n1. Split the ledger\n2. Add replication\n3. Migrate the data\nShall I go on?"


@pytest.mark.parametrize(
    ("text", "kind", "demand"),
    [
        ("hello", Kind.CHAT, MECHANICAL),
        ("谢谢", Kind.CHAT, MECHANICAL),
        ("What is a B-tree?", Kind.QUESTION, MECHANICAL),
        ("Was ist ein B-Baum?", Kind.QUESTION, MECHANICAL),
        ("什么是哈希表？", Kind.QUESTION, MECHANICAL),
        ("Что такое рекурсия?", Kind.QUESTION, MECHANICAL),
        ("Write a Python function that reverses a string", Kind.CODE, MECHANICAL),
        ("Écris une fonction Python qui inverse une chaîne", Kind.CODE, MECHANICAL),
        ("写一个 Python 函数反转字符串", Kind.CODE, MECHANICAL),
        ("Напиши функцию на Python", Kind.CODE, MECHANICAL),
        ("Build a search engine with an inverted index, ranking, fuzzy matching, and facets.", Kind.CODE, DEEP),
        ("Write unit tests for the parser", Kind.TESTS, MECHANICAL),
        ("为这个函数编写单元测试", Kind.TESTS, MECHANICAL),
        ("Rename all variables to snake_case", Kind.EDIT, MECHANICAL),
        ("Extract all dates from the text as JSON", Kind.EXTRACTION, MECHANICAL),
        ("Summarize this article", Kind.SUMMARY, MECHANICAL),
        ("Fasse diesen Text zusammen", Kind.SUMMARY, MECHANICAL),
        ("要約してください", Kind.SUMMARY, MECHANICAL),
        ("Translate 'good night' to Spanish", Kind.TRANSLATION, MECHANICAL),
        ("Traduce esta frase al inglés", Kind.TRANSLATION, MECHANICAL),
        ("What is 17 * 23?", Kind.ARITHMETIC, MECHANICAL),
        ("Is this valid JSON? Check the syntax: {a: 1}", Kind.SYNTAX, MECHANICAL),
        ("Fix the syntax error: print('a'", Kind.SYNTAX, MECHANICAL),
        ("Write a poem about rain", Kind.WRITING, MECHANICAL),
        ("Explain how TLS works", Kind.EXPLANATION, MECHANICAL),
        ("Объясни разницу между TCP и UDP", Kind.EXPLANATION, MECHANICAL),
        (DESIGN, Kind.DESIGN, DEEP),
        ("Entwirf eine Architektur für einen Webshop", Kind.DESIGN, DEEP),
        ("设计一个分布式缓存系统", Kind.DESIGN, DEEP),
        ("Prove that there are infinitely many primes", Kind.PROOF, DEEP),
        ("Beweise, dass die Wurzel aus 2 irrational ist", Kind.PROOF, DEEP),
        ("証明してください：素数は無限に存在する", Kind.PROOF, DEEP),
        ("Why is my service leaking memory? Find the root cause.", Kind.DEBUGGING, DEEP),
        ("Mi programa no funciona y falla al arrancar, depura el error", Kind.DEBUGGING, DEEP),
    ],
)
def test_kind_and_demand_are_read_from_the_words(text, kind, demand):
    reading = understand(text)
    assert (reading.kind, reading.demand) == (kind, demand)


@pytest.mark.parametrize(
    "noise",
    [
        REMINDER + "\n{}",
        "{}\n" + REMINDER,
        REMINDER + "{}" + REMINDER,
        "<environment_details>\nPrepare a migration plan\n</environment_details>\n<task>{}</task>",
        "<environment_context>\n<cwd>/src/design/architecture</cwd>\n</environment_context>\n{}",
        "<ide_selection>Prove the theorem</ide_selection>{}",
        "<user_query>\n{}\n</user_query>",
        "<SYSTEM-REMINDER>Design an architecture</SYSTEM-REMINDER>{}",
    ],
)
def test_what_hosts_inject_is_not_what_was_asked(noise):
    """Routing on the words of a `<system-reminder>` sent small talk to the strongest model."""
    reading = read([user(noise.format("What is a mutex?"))])
    assert (reading.kind, reading.demand, reading.text) == (Kind.QUESTION, MECHANICAL, "What is a mutex?")


def test_a_turn_that_holds_only_injected_text_is_passed_over():
    reading = read([user(DESIGN), assistant("Working on it."), user(REMINDER)])
    assert reading.kind is Kind.DESIGN


def test_a_pasted_tool_result_is_passed_over():
    talk = [user("Rename the variables"), assistant("..."), user("[read_file for 'a.py'] Result:\nDesign a platform")]
    assert read(talk).kind is Kind.EDIT


def test_a_tag_that_is_never_closed_hides_nothing():
    assert spoken("What does <system-reminder> mean?") == "What does  mean?"


@pytest.mark.parametrize("length", [1, 300])
def test_neither_a_stack_trace_nor_length_makes_a_request_hard(length):
    trace = "Traceback (most recent call last):\n" + '  File "a.py", line 1, in f\n' * length + "KeyError: 1"
    reading = understand(f"Translate this message to French:\n```\n{trace}\n```")
    assert (reading.kind, reading.demand) == (Kind.TRANSLATION, MECHANICAL)


@pytest.mark.parametrize(
    "agreement",
    [
        "yes", "Yes, please do it.", "ok continue", "go on", "Continue", "y", "LGTM, go ahead!", "option 2", "2",
        "proceed with step 1", "ja, mach weiter", "oui, vas-y", "sí, adelante", "sim, pode continuar",
        "да, продолжай", "好的，继续", "可以", "はい、お願いします",
        "<system-reminder>What is a mutex?</system-reminder>yes",
    ],
)  # fmt: skip
def test_agreeing_to_a_plan_is_as_hard_as_the_plan(agreement):
    """A bare "yes" to a complex plan went to the cheapest tier."""
    reading = read([user(DESIGN), assistant(PLAN), user(agreement)])
    assert (reading.kind, reading.demand, reading.confirms) == (Kind.DESIGN, DEEP, True)
    assert reading.text == DESIGN


def test_agreement_upon_agreement_goes_back_to_what_was_asked():
    talk = [user(DESIGN), assistant(PLAN), user("yes"), assistant("Step 1 is done."), user("ok continue")]
    assert (read(talk).kind, read(talk).demand) == (Kind.DESIGN, DEEP)


def test_what_an_assistant_planned_counts_even_where_the_ask_was_small():
    talk = [user("What would you do about our slow tests?"), assistant(PLAN), user("yes")]
    assert read(talk).demand is DEEP


def test_agreeing_to_something_mechanical_stays_mechanical():
    talk = [user("Translate 'cat' to French"), assistant("chat. Shall I do dog, too?"), user("yes")]
    assert (read(talk).kind, read(talk).demand) == (Kind.TRANSLATION, MECHANICAL)


@pytest.mark.parametrize(
    "text", ["yes but use Postgres and explain why", "Is it?", "no", "continue the story with a dragon"]
)
def test_more_than_agreement_is_read_itself(text):
    assert not read([user(DESIGN), assistant(PLAN), user(text)]).confirms


def test_a_turn_that_says_nothing_of_its_kind_is_more_of_the_turn_before():
    reading = read([user(DESIGN), assistant("Done."), user("same for the refunds")])
    assert (reading.kind, reading.demand, reading.text) == (Kind.DESIGN, DEEP, "same for the refunds")


def test_agreement_to_nothing_is_small_talk():
    assert read([user("yes")]).demand is MECHANICAL
    assert read([]).kind is Kind.CHAT


def test_prose_and_blocks_are_told_apart():
    prose, blocks = parts("See `a.py`:\n```python title\nx = 1\n```\n> quoted\nand\n~~~\nopen")
    assert prose.split() == ["See", "`a.py`:", "and"]
    assert [(each.info, each.text, each.before) for each in blocks] == [
        ("python title", "x = 1", "See `a.py`:"),
        ("", "open", "and"),
    ]
