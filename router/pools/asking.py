"""What an OpenAI request asks of our generators, and the sentence where they cannot do it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from contracts.messages import Sampling, Turn
from router.pools.base import Fault, PoolError
from router.settings import PoolSettings

SEEDS = 2**63
STOPS = 16  # stop strings
STOP_CHARACTERS = 256  # of one
LARGEST_GROUP = 128  # what OpenAI allows for n
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

# Parameters that would change the distribution in ways that our engines cannot, and the values that ask for nothing.
UNABLE: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "audio": (),
    "functions": ([],),
    "prediction": (),
    "web_search_options": (),
}


@dataclass(frozen=True)
class Terms:
    """A request in the terms of a task."""

    turns: list[Turn]
    tools: str  # JSON; empty = none
    sampling: Sampling
    choices: int
    seed: int | None  # None = any
    logprobs: bool


def terms_of(body: dict[str, Any], settings: PoolSettings) -> Terms:
    """A chat request as a task for our generators. Raises `PoolError` REFUSED for what they cannot do."""
    for name, nothing in UNABLE.items():
        if body.get(name) is not None and body[name] not in nothing:
            raise refused(f"this model cannot do {name}", name)
    response_format = body.get("response_format") or {"type": "text"}
    if not isinstance(response_format, dict) or response_format.get("type") != "text":
        raise refused(
            "this model cannot be held to JSON: leave response_format out, or ask in the prompt", "response_format"
        )
    modalities = body.get("modalities")
    if modalities not in (None, [], ["text"]):
        raise refused("this model answers with text only", "modalities")
    seed = body.get("seed")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
        raise refused("seed must be a whole number", "seed")
    return Terms(
        turns=_turns(body.get("messages")),
        tools=_tools(body, settings),
        sampling=_sampling(body, settings),
        choices=int(_number(body, "n", 1, 1, LARGEST_GROUP, whole=True)),
        seed=None if seed is None else seed % SEEDS,
        logprobs=bool(body.get("logprobs")),
    )


def refused(sentence: str, parameter: str | None) -> PoolError:
    """The application asked for something that no call of this pool can give."""
    error = {"message": sentence, "type": "invalid_request_error", "param": parameter, "code": None}
    return PoolError(Fault.REFUSED, sentence, status=400, body=error)


def _sampling(body: dict[str, Any], settings: PoolSettings) -> Sampling:
    name = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > STOPS:
        raise refused(f"stop must be a text or up to {STOPS} of them", "stop")
    if not all(isinstance(each, str) and 0 < len(each) <= STOP_CHARACTERS for each in stops):
        raise refused(f"each stop must be a text of 1 to {STOP_CHARACTERS} characters", "stop")
    top_p = _number(body, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise refused("top_p must be above 0; for the likeliest token set temperature to 0", "top_p")
    return Sampling(
        max_tokens=int(_number(body, name, settings.window, 1, 2**31, whole=True)),
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=top_p,
        top_k=int(_number(body, "top_k", 0, 0, 2**31, whole=True)),
        stop=[clean(each) for each in stops],
    )


def _number(
    body: dict[str, Any], name: str, default: float, lowest: float, highest: float, *, whole: bool = False
) -> float:
    value = body.get(name)
    if value is None:
        return default
    right = isinstance(value, int) if whole else isinstance(value, int | float)
    if not right or isinstance(value, bool) or not lowest <= value <= highest:
        kind = "a whole number" if whole else "a number"
        raise refused(f"{name} must be {kind} from {lowest:g} to {highest:g}", name)
    return value


def _tools(body: dict[str, Any], settings: PoolSettings) -> str:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if not tools or choice == "none":
        return ""
    if "tools" not in settings.capabilities:
        raise refused("this model cannot call tools", "tools")
    if choice not in (None, "auto"):
        raise refused("this model cannot be made to call a tool: leave tool_choice at auto", "tool_choice")
    return clean(json.dumps(tools))


def _turns(messages: Any) -> list[Turn]:
    if not isinstance(messages, list) or not messages:
        raise refused("messages must hold at least one message", "messages")
    return [_turn(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _turn(message: Any, where: str) -> Turn:
    role = ROLES.get(str(message.get("role"))) if isinstance(message, dict) else None
    if role is None:
        raise refused(f"{where}: role must be one of {', '.join(ROLES)}", where)
    calls = message.get("tool_calls") if role == "assistant" else None
    return Turn(
        role=role,
        content=clean(_text(message.get("content"), where)),
        tool_calls=clean(json.dumps(calls)) if calls else "",
        tool_call_id=clean(str(message.get("tool_call_id") or "")) if role == "tool" else "",
    )


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refused(f"{where}: content must be text or an array of parts", where)
    parts = []
    for part in content:
        text = (part.get("text", part.get("refusal")) if isinstance(part, dict) else part) if part else ""
        if not isinstance(text, str):
            raise refused(f"{where}: this model reads text only", where)
        parts.append(text)
    return "\n".join(parts)


def clean(text: str) -> str:
    """Text that UTF-8 can carry: lone surrogates become U+FFFD."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
