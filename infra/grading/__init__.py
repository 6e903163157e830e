"""Answers judged: extraction and equivalence as pure functions, run in the sandbox, reported as a `Grade`."""

from infra.grading.grader import Grade, Grader

__all__ = ["Grade", "Grader"]
