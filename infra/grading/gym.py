"""reasoning_gym's own scoring, for the sandbox alone: some of its scorers evaluate the model's text."""

from __future__ import annotations

import math
from typing import Any

from reasoning_gym.dataset import ProceduralDataset
from reasoning_gym.factory import DATASETS, get_score_answer_fn

from infra.grading import entries, extract
from infra.grading.verifiers import Verdict, no_answer, verdict

RIGHT = 1.0 - 1e-9


def grade(requests: list[dict[str, Any]]) -> list[Verdict]:
    """Sandbox entry: judge completions, each {verifier: "gym:<name>", completion, expected: a packed entry}.

    The score of reasoning_gym is the reward; only a full score is right. Raises whatever a scorer raises.
    """
    return [_grade(request["verifier"].partition(":")[2], request) for request in requests]


def compares(name: str) -> bool:
    """Sandbox entry: whether a task's scorer is the common one, which compares texts and evaluates nothing."""
    return DATASETS[name][0].score_answer is ProceduralDataset.score_answer


def _grade(name: str, request: dict[str, Any]) -> Verdict:
    answer = extract.answer(request["completion"])
    if answer is None:
        return no_answer()
    score = float(get_score_answer_fn(name)(answer.text, entries.unpack(request["expected"])))
    if not math.isfinite(score):
        raise ValueError(f"{name} gave the score {score}")
    reward = min(1.0, max(0.0, score))
    return verdict(reward, reward >= RIGHT, {"correct": reward, "marked": float(answer.marked)})
