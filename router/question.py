"""What the routing policy is asked about a request, or about one subtask of it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from router.admission.models import Asked
from router.chat import ChatRequest
from router.decomposition.plan import Plan, Subtask
from router.policy.affinity import View
from router.policy.decision import Question
from router.pools.counting import prompt_tokens

NOTHING_KNOWN = View()


def question_of(
    request: ChatRequest,
    asked: Asked,
    plan: Plan,
    subtask: Subtask,
    *,
    view: View = NOTHING_KNOWN,
    body: Mapping[str, Any] | None = None,
    budget: int | None = None,
    minimum: str = "",
    checked: bool = False,
) -> Question:
    """The question that `subtask` of `plan` raises.

    `view` is what is known of the session, `body` what is sent for a part of a request, `budget` the picodollars left,
    `minimum` a tier below which it must not go, and `checked` whether a verifier will look at the answer. Only the
    request as it stands has the session's prompt, its tools, its images and its form of answer.
    """
    whole = not subtask.prompt
    view = view if whole else NOTHING_KNOWN
    return Question(
        text=plan.text if whole else subtask.prompt,
        kind=subtask.kind,
        demand=subtask.demand,
        prompt_tokens=request.prompt_tokens if whole or body is None else prompt_tokens(body),
        max_tokens=request.max_tokens,
        tools=whole and bool(request.tools),
        json_mode=whole and request.json_mode,
        images=whole and any(message.images for message in request.messages),
        checked=checked,
        session_pool=view.pool,
        trajectory=plan.trajectory,
        allowed=asked.pools,
        budget=budget,
        tolerance=asked.tolerance,
        minimum=minimum or subtask.minimum or view.minimum,
    )
