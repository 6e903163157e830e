"""Syntax of shell scripts, for bash."""

from __future__ import annotations

import re
import subprocess

import tree_sitter
import tree_sitter_bash

from router.verification import answers
from router.verification.registry import Arguments
from router.verification.result import Result, failed, passed, undecided

SHELL = frozenset({"bash", "sh", "shell", "zsh", "ksh"})
BASH_SECONDS = 2.0
_LANGUAGE = tree_sitter.Language(tree_sitter_bash.language())
_PROMPT = re.compile(r"^\$ ", re.MULTILINE)  # of a session, whose output is no script


def script(answer: str, _: Arguments) -> Result:
    """The shell blocks, or the answer as a whole where it does not read like prose."""
    found = [block.text for block in answers.code(answer, SHELL)]
    if not found:
        text = answers.plain(answer)
        if not text or re.match(r"[A-Z][\w']*,? [^=]", text):
            return undecided("There is no shell script in the answer.")
        found = [text]
    scripts = [text for text in found if not _PROMPT.search(text)]
    if not scripts:
        return undecided("It shows a session, not a script.")
    return _parsed("\n".join(scripts).encode("utf-8", "replace"))  # together: a process for each would be too many


def _parsed(text: bytes) -> Result:
    """`bash -n` reads without executing. Where no process can be started, a grammar that knows most of bash decides."""
    try:
        done = subprocess.run(
            ["/bin/bash", "--norc", "--noprofile", "-n", "-s"],
            input=text,
            capture_output=True,
            timeout=BASH_SECONDS,
            check=False,
            env={"LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        return undecided("bash did not finish reading the script in time.")
    except OSError:
        whole = not tree_sitter.Parser(_LANGUAGE).parse(text).root_node.has_error
        return passed() if whole else undecided("Only bash itself could say whether this script is well formed.")
    if done.returncode < 0:
        return undecided("bash could not read the script.")
    if done.returncode == 0:
        return passed()
    message = done.stderr.decode("utf-8", "replace").strip().split("\n")[0].removeprefix("/bin/bash: ")
    return failed(f"The shell script does not parse: {message[:200]}.")
