"""What passes between router and generators while a request is answered. None of it is stored."""

from __future__ import annotations

from enum import StrEnum

from contracts.base import Message, Nat, PolicyRef, Positive, Token, require_finite
from contracts.errors import InvalidMessage


class TokensError(StrEnum):
    """Why a completion could not be had; a sentence goes with it."""

    PROMPT_TOO_LONG = "prompt_too_long"  # it leaves no room in the model's window
    REFUSED = "refused"  # no generator of this pool can do it
    FAILED = "failed"  # this one could not; another may
    EXPIRED = "expired"  # the task's deadline passed


class Tokens(Message, frozen=True, tag="tokens"):
    """A stretch of one completion, streamed while it is sampled: generators -> router. Not stored anywhere.

    Stretches of one attempt follow each other: `start` is the number of tokens before it. A task that is delivered
    again streams again from its start as another attempt; what an earlier attempt said is void then.
    """

    run: Token  # run id
    task_id: str  # the task it answers
    attempt: Positive  # delivery of the task; a higher one takes the place of a lower
    index: Nat  # completion in the group
    start: Nat  # tokens of the completion before this stretch
    text: str = ""  # what it adds to the answer: whole characters, without the stop string; may lag behind the tokens
    tokens: list[Nat] = []  # [n] sampled token ids
    pieces: list[str] = []  # [n] text of each token by itself, U+FFFD where that is no whole character
    logprobs: list[float] = []  # [n] natural log, under the distribution sampled
    policy: PolicyRef | None = None  # weights that sampled the stretch; None where it has no tokens
    finish: str = ""  # Finish, on the completion's last stretch
    prompt_tokens: Nat = 0  # of the prompt; 0 = not known yet
    rollout: str = ""  # on the last stretch: id of the published rollout
    code: str = ""  # TokensError: the whole task ends with it; empty = all is well
    error: str = ""  # the sentence that goes with it
    generator: str = ""  # instance

    def check(self) -> None:
        where = f"tokens of {self.task_id}"
        if not len(self.tokens) == len(self.pieces) == len(self.logprobs):
            raise InvalidMessage(f"{where}: tokens, pieces and logprobs differ in length")
        if self.tokens and self.policy is None:
            raise InvalidMessage(f"{where}: no policy sampled them")
        require_finite(where, self.logprobs)


class Cancel(Message, frozen=True, tag="cancel"):
    """Nobody waits for this task any more: router -> generators. Not stored anywhere."""

    run: Token  # run id
    task_id: str  # of the task
