"""An agent's turns: what it does, what failed, when it is lifted to strong pools and when it may come down again."""

import pytest

from contracts.routing import Demand
from router.chat import Message
from router.decomposition.plan import Kind
from router.decomposition.planner import plan
from router.decomposition.tools import Deed, catalogue
from router.decomposition.trajectory import LATCH, follow
from router.verification.check import Check
from tests.unit.router.talks import assistant, call, request, result, user

ASK = user("Fix the failing date parser in dates.py")
TOOLS = [{"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}]
TEST = call("Bash", command="pytest -q tests/test_dates.py")
BAD = result("FAILED tests/test_dates.py::test_leap - AssertionError\n1 failed, 3 passed in 0.2s")
GOOD = result("4 passed in 0.2s")
READ = [call("Read", file_path="dates.py"), result("def parse(text): ...")]
EDIT = [call("Edit", file_path="dates.py", old_string="a", new_string="b"), result("The file has been updated.")]
FAILED_TEST = [TEST, BAD]
TODO = [call("TodoWrite", todos=[]), result("ok")]
MISSED = [call("Read", file_path="nowhere.py"), result("File does not exist", is_error=True)]


@pytest.mark.parametrize(
    ("name", "arguments", "deed"),
    [
        ("Read", "{}", Deed.EXPLORING),
        ("read_file", "{}", Deed.EXPLORING),
        ("search_files", "{}", Deed.EXPLORING),
        ("Grep", "{}", Deed.EXPLORING),
        ("mcp__github__get_issue", "{}", Deed.EXPLORING),
        ("mcp__files__read_text_file", "{}", Deed.EXPLORING),
        ("Write", "{}", Deed.PRODUCING),
        ("MultiEdit", "{}", Deed.PRODUCING),
        ("write_to_file", "{}", Deed.PRODUCING),
        ("apply_patch", "{}", Deed.PRODUCING),
        ("replace_string_in_file", "{}", Deed.PRODUCING),
        ("createPullRequest", "{}", Deed.PRODUCING),
        ("run_tests", "{}", Deed.VERIFYING),
        ("get_errors", "{}", Deed.VERIFYING),
        ("TodoWrite", "{}", Deed.PLANNING),
        ("str_replace_editor", '{"command": "view", "path": "/a"}', Deed.EXPLORING),
        ("str_replace_editor", '{"command": "str_replace", "path": "/a"}', Deed.PRODUCING),
        ("str_replace_based_edit_tool", '{"command": "create"}', Deed.PRODUCING),
        ("execute_command", '{"command": "npm test"}', Deed.VERIFYING),
        ("shell", '{"command": ["bash", "-lc", "cd /repo && cargo test"]}', Deed.VERIFYING),
        ("shell", '{"command": ["apply_patch", "*** Begin Patch\\n"]}', Deed.PRODUCING),
        ("run_terminal_cmd", '{"command": "ls -la"}', Deed.EXPLORING),
        ("exec_command", '{"cmd": "rg -n parse src"}', Deed.EXPLORING),
        ("Bash", '{"command": "pytest -q", "descr', Deed.VERIFYING),
        ("Bash", "not json at all", Deed.OTHER),
        ("summon_dragon", "{}", Deed.OTHER),
        ("", "", Deed.OTHER),
    ],
)
def test_tools_are_known_by_name_and_command(name, arguments, deed):
    assert catalogue().deed(name, arguments) is deed


@pytest.mark.parametrize(
    ("command", "deed"),
    [
        ("cd repo && pytest tests -x", Deed.VERIFYING),
        ("python -m pytest", Deed.VERIFYING),
        ("PYTHONPATH=. timeout 60 python3 -m unittest discover", Deed.VERIFYING),
        ("python tests/runtests.py admin_views", Deed.VERIFYING),
        ("python manage.py test", Deed.VERIFYING),
        ("uv run ruff check .", Deed.VERIFYING),
        ("npx tsc --noEmit", Deed.VERIFYING),
        ("sudo make -j4 check 2>&1 | tail -5", Deed.VERIFYING),
        ("./gradlew build", Deed.VERIFYING),
        ("bash -n script.sh", Deed.VERIFYING),
        ("git diff HEAD~1", Deed.EXPLORING),
        ("cat a.py | head -20", Deed.EXPLORING),
        ("sed -n 1,20p a.py", Deed.EXPLORING),
        ("find . -name '*.py' 2>/dev/null", Deed.EXPLORING),
        ("sed -i 's/a/b/' a.py", Deed.PRODUCING),
        ("cat > a.py <<'EOF'\nx = 1\nEOF", Deed.PRODUCING),
        ("echo hello >> notes.txt", Deed.PRODUCING),
        ("git commit -m 'x'", Deed.PRODUCING),
        ("pip install requests", Deed.PRODUCING),
        ("python -c 'print(1)'", Deed.OTHER),
        ("", Deed.OTHER),
    ],
)
def test_commands_are_known_by_their_first_words(command, deed):
    assert catalogue().command(command) is deed


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([ASK], Kind.PLANNING),
        ([ASK, *READ], Kind.EXPLORING),
        ([ASK, *READ, *EDIT], Kind.PRODUCING),
        ([ASK, *READ, *EDIT, TEST, GOOD], Kind.VERIFYING),
        ([ASK, *READ, *EDIT, *FAILED_TEST], Kind.RECOVERING),
        ([ASK, call("Read", file_path="x"), result("no such file", is_error=True)], Kind.RECOVERING),
        ([ASK, *READ, user("Wait, use another approach: rewrite the lexer")], Kind.PLANNING),
        ([ASK, *TODO], Kind.EXPLORING),
        ([ASK, *READ, *EDIT, *TODO], Kind.PRODUCING),
        ([ASK, *FAILED_TEST, *TODO], Kind.RECOVERING),
    ],
)
def test_the_kind_of_the_next_turn(messages, kind):
    assert follow(messages, tools=True).kind is kind


@pytest.mark.parametrize(
    ("name", "arguments", "text", "is_error", "failed"),
    [
        ("Read", {"file_path": "log"}, "Traceback (most recent call last):\nKeyError", False, False),
        ("Read", {"file_path": "log"}, "anything", True, True),
        ("Read", {"file_path": "log"}, "Error: file does not exist", False, True),
        ("Edit", {}, "<tool_use_error>String to replace not found</tool_use_error>", False, True),
        ("Bash", {"command": "cat err.log"}, "Traceback (most recent call last):", False, False),
        ("Bash", {"command": "grep -n foo a.py"}, "Exit code 1", False, False),
        ("Bash", {"command": "python run.py"}, "Traceback (most recent call last):\nKeyError: 1", False, True),
        ("Bash", {"command": "pytest"}, "2 failed, 1 passed", False, True),
        ("Bash", {"command": "pytest"}, "3 passed, 0 failed", False, False),
        ("Bash", {"command": "mypy ."}, "Found 2 errors in 1 file", False, True),
        ("Bash", {"command": "cargo build"}, "error[E0382]: borrow of moved value", False, True),
        ("shell", {"command": ["bash", "-lc", "make"]}, '{"output": "x", "metadata": {"exit_code": 2}}', False, True),
        ("shell", {"command": ["bash", "-lc", "make"]}, '{"output": "x", "metadata": {"exit_code": 0}}', False, False),
        ("bash", {"command": "pytest"}, "<returncode>1</returncode>\n<output>x</output>", False, True),
        ("exec_command", {"cmd": "pytest"}, "Process exited with code 0\nOutput:\n1 error was expected", False, False),
    ],
)
def test_what_counts_as_failed(name, arguments, text, is_error, failed):
    """A result marked `is_error` was ignored; and what a file says is no failure of reading it."""
    talk = [ASK, call(name, **arguments), result(text, is_error)]
    assert follow(talk, tools=True).figures["failed"] == float(failed)


def test_a_session_that_keeps_failing_stays_on_strong_pools_until_a_verification_passes():
    talk = [ASK]
    for count in range(1, LATCH + 1):
        talk += [*READ, *EDIT, *FAILED_TEST]
        assert follow(talk, tools=True).latched is (count >= LATCH)
    talk += [*READ, *EDIT]
    assert follow(talk, tools=True).minimum == "strong"
    talk += [user("ok continue")]
    assert follow(talk, tools=True).minimum == "strong"
    talk += [TEST, GOOD]
    assert follow(talk, tools=True).minimum == ""
    assert follow([*talk, *FAILED_TEST], tools=True).minimum == ""


def test_failures_that_were_made_good_do_not_add_up():
    talk = [ASK]
    for _ in range(5):
        talk += [*MISSED, *READ]
    assert follow(talk, tools=True).severity == 0


def test_the_same_call_again_and_again_is_spinning_unless_something_was_written():
    look = [call("Grep", pattern="parse"), result("nothing")]
    assert follow([ASK, *look], tools=True).spinning == 0
    assert follow([ASK, *look * 3], tools=True).kind is Kind.RECOVERING
    assert follow([ASK, *look * 4], tools=True).latched
    working = [ASK, *[*FAILED_TEST, *EDIT] * 2, *FAILED_TEST]
    assert follow(working, tools=True).spinning == 0


def test_parallel_calls_and_their_results_belong_together_by_order():
    turn = Message("assistant", "", tool_calls=("Read", "Bash"), arguments=("{}", '{"command": "pytest"}'))
    assert follow([ASK, turn, result("Traceback in a file"), result("5 passed")], tools=True).kind is Kind.VERIFYING
    assert follow([ASK, turn, result("text"), result("5 failed")], tools=True).kind is Kind.RECOVERING


def test_calls_that_are_written_out_in_the_text_count_once_their_result_is_there():
    bash = assistant("Let me look.\n```bash\nls\n```")
    assert not follow([user("How do I list files?"), bash, user("Thanks!")], tools=False).figures
    talk = [ASK, bash, user("<returncode>0</returncode>\n<output>a.py</output>")]
    assert follow(talk, tools=False).kind is Kind.EXPLORING
    cline = assistant("<execute_command><command>npm test</command></execute_command>")
    assert (
        follow([ASK, cline, user("[execute_command for 'npm test'] Result:\n2 failing")], tools=False).figures["turns"]
        == 1
    )


@pytest.mark.parametrize("role", ["user", "system", "developer"])
def test_a_hosts_reminder_behind_a_result_is_no_new_task(role):
    reminder = Message(role, "<system-reminder>The list of tasks is empty.</system-reminder>")
    assert follow([ASK, *READ, reminder], tools=True).kind is Kind.EXPLORING
    assert follow([ASK, *FAILED_TEST, reminder], tools=True).kind is Kind.RECOVERING
    assert follow([ASK, *READ, user("Now rename it"), reminder], tools=True).kind is Kind.PLANNING


def test_a_plain_chat_has_no_trajectory():
    found = follow([user("hi"), assistant("hello"), user("What is a mutex?")], tools=False)
    assert (found.kind, found.figures, found.minimum) == (None, {}, "")


@pytest.mark.parametrize(
    ("messages", "kind", "demand", "minimum"),
    [
        (["Design a sharded queue with replication"], Kind.PLANNING, Demand.DEEP, ""),
        (["hello"], Kind.CHAT, Demand.MECHANICAL, ""),
        ([ASK, *READ], Kind.EXPLORING, Demand.MECHANICAL, ""),
        ([ASK, *READ, *EDIT, TEST, GOOD], Kind.VERIFYING, Demand.MECHANICAL, ""),
        (["Our export job eats all memory on large tenants. Make it stream."], Kind.PLANNING, Demand.DEEP, ""),
        (["The blue widget wobbles."], Kind.PLANNING, Demand.DEEP, ""),
        (["Write unit tests for dates.py"], Kind.PLANNING, Demand.MECHANICAL, ""),
        (["What does dates.py do?"], Kind.QUESTION, Demand.MECHANICAL, ""),
        ([ASK, *MISSED], Kind.RECOVERING, Demand.MECHANICAL, ""),
        ([ASK, *MISSED, *MISSED], Kind.RECOVERING, Demand.DEEP, ""),
        ([ASK, *READ, *EDIT, *FAILED_TEST], Kind.RECOVERING, Demand.DEEP, ""),
        ([ASK, *[*EDIT, *FAILED_TEST] * 3], Kind.RECOVERING, Demand.DEEP, "strong"),
        ([ASK, *[*EDIT, *FAILED_TEST] * 3, *READ], Kind.EXPLORING, Demand.MECHANICAL, "strong"),
    ],
)
def test_an_agents_turn_in_a_plan(messages, kind, demand, minimum):
    made = plan(request(*messages, tools=("Bash",)))
    only = made.subtasks[0]
    assert (made.whole, only.kind, only.demand, only.minimum) == (True, kind, demand, minimum)


def test_mechanical_turns_of_an_agent_have_their_calls_checked():
    asked = request(ASK, *READ, tools=("Bash",))
    asked.body["tools"] = TOOLS
    check = plan(asked).subtasks[0].check
    assert check == Check("tool_call", {"tools": {"Bash": {"type": "object"}}})
    planning = request("Design a sharded queue with replication", tools=("Bash",))
    planning.body["tools"] = TOOLS
    assert plan(planning).subtasks[0].check is None
