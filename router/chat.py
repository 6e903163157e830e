"""What applications say and what they get: OpenAI's chat completions, as far as the router looks into them.

Whatever it does not look into travels unchanged in `body`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class ApiError(Exception):
    """What an application is told, in OpenAI's shape; `retry_after` in seconds goes into the header of that name."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = code
        self.param = param
        self.retry_after = retry_after


def internal() -> ApiError:
    """What is told of a fault of ours."""
    return ApiError(500, "the router failed to answer; the request may be tried again", type="server_error")


@dataclass(frozen=True)
class Usage:
    """Tokens of one call; `cached` and `cache_written` are parts of `prompt`."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0  # read from the prompt cache
    cache_written: int = 0  # written to it, where the pool says so
    estimated: bool = False  # counted here, because the pool did not say

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt + other.prompt,
            self.completion + other.completion,
            self.cached + other.cached,
            self.cache_written + other.cache_written,
            self.estimated or other.estimated,
        )

    def body(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Message:
    """One turn of a conversation, reduced to what decisions are made from."""

    role: str  # system, developer, user, assistant, tool
    text: str  # all text parts, joined; lone surrogates replaced
    images: int = 0  # parts that are not text
    tool_calls: tuple[str, ...] = ()  # names of the functions that an assistant turn calls
    arguments: tuple[str, ...] = ()  # [len(tool_calls)] their arguments as JSON text
    is_error: bool = False  # a tool's result that says it failed, however the application marks that


@dataclass(frozen=True)
class ChatRequest:
    """A validated request. `body` is what was sent, and what is sent on with another `model`."""

    body: dict[str, Any]
    model: str
    messages: tuple[Message, ...]
    stream: bool = False
    include_usage: bool = False
    tools: tuple[str, ...] = ()  # names of the functions on offer
    json_mode: bool = False  # response_format asks for an object, with or without a schema
    schema: dict[str, Any] | None = None  # response_format's JSON schema
    max_tokens: int | None = None
    choices: int = 1  # n
    prompt_tokens: int = 0  # estimate, tools included
    session: str = ""  # of the affinity header; empty = derived from the first messages

    def with_messages(self, messages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
        """A body that asks something else in the same way: for subtasks, escalations and joins."""
        return {**self.body, "messages": messages, **changes}


@dataclass(frozen=True)
class Reply:
    """A whole answer. `body` is the chat completion as the pool gave it."""

    body: dict[str, Any]
    text: str  # content of the first choice, empty where it only calls tools
    finish: str  # finish_reason of the first choice
    usage: Usage
    model: str  # that answered, by its own word
    tool_calls: tuple[dict[str, Any], ...] = ()  # of the first choice
    policy: tuple[int, int, str] | None = None  # generation, version and digest of the weights, for bus pools
    rollout: str = ""  # id of the rollout with its log-probs, for bus pools
    pool: str = ""  # that answered; filled in by the relay


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed answer: `body` is the chat.completion.chunk as the pool gave it."""

    body: dict[str, Any]
    text: str = ""  # new content of the first choice
    finish: str | None = None  # finish_reason of the first choice, on its last chunk
    usage: Usage | None = None  # on the chunk that carries it
    policy: tuple[int, int, str] | None = None
    rollout: str = ""
    pool: str = ""  # as in Reply
