"""Our sampling contract in vLLM's terms: parameters from a request, tokens with log-prob and policy from outputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from contracts.messages import Finish, PolicyRef
from generator.engines.base import EngineError, RequestRefused, SampledToken, SampleRequest

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import CompletionOutput

TEMPERATURES = (0.01, 2.0)  # what vLLM samples beside 0; it would raise a lower one in silence


Spans = Sequence[tuple[str, int]]  # label of a policy, index of the first token that it sampled; ascending


class NotFinite(EngineError):
    """The policy's logits are not finite numbers."""


def label(policy: PolicyRef) -> str:
    """A policy as the name under which vLLM notes the weights behind every token, and its prefix cache's salt."""
    return f"{policy.generation}.{policy.version}.{policy.digest}"


def labelled(name: str) -> PolicyRef:
    """The policy of a `label`."""
    generation, version, digest = name.split(".")
    return PolicyRef(int(generation), int(version), digest)


def check_temperature(request: SampleRequest) -> None:
    """Raise `RequestRefused` for a temperature that vLLM would not sample at, or only at another one."""
    temperature, (lowest, highest) = request.sampling.temperature, TEMPERATURES
    if temperature and not lowest <= temperature <= highest:
        raise RequestRefused(f"vLLM samples at temperature 0 or {lowest:g} to {highest:g}, not at {temperature:g}")


def parameters(request: SampleRequest, index: int, window: int, eos: list[int]) -> SamplingParams:
    """How vLLM samples completion `index` of a group: ends as `completions.Completion` does, seeded by its place."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=min(sampling.max_tokens, window - len(request.prompt)),
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=request.seed + index,
        stop=sampling.stop,
        include_stop_str_in_output=True,
        stop_token_ids=eos,
        ignore_eos=True,  # they are all among those above
        logprobs=0,  # of the sampled token alone
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.DELTA,
    )


class Collected:
    """The tokens of one completion, as vLLM reports them bit by bit."""

    def __init__(self, request: SampleRequest, index: int) -> None:
        self._index = index
        self._greedy = request.sampling.temperature == 0
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._given = 0  # tokens that have been passed on

    def add(self, output: CompletionOutput, spans: Spans | None) -> list[SampledToken]:
        """Take the next tokens; returns those that can be passed on, each with its policy.

        That is all that has come where `spans` say who sampled it, and at the completion's end in any case. Raises
        `NotFinite` for a log-prob that is no number, `EngineError` for an end that is none of ours.
        """
        assert output.logprobs is not None
        for token, candidates in zip(output.token_ids, output.logprobs, strict=True):
            logprob = candidates[token].logprob
            if not math.isfinite(logprob):
                raise NotFinite("logits that are not finite")
            self._tokens.append(token)
            self._logprobs.append(0.0 if self._greedy else logprob)
        if output.finish_reason is None:
            return self._take(spans) if spans else []
        if output.finish_reason not in ("stop", "length"):
            raise EngineError(f"vLLM ended a completion with {output.finish_reason!r}")
        finish = Finish.STOP if output.finish_reason == "stop" else Finish.LENGTH
        *sampled, last = self._take([(span.version, span.start) for span in output.weight_versions or ()])
        return [*sampled, replace(last, finish=finish)]

    def _take(self, spans: Spans) -> list[SampledToken]:
        """What has not been passed on. Spans may have begun since that no token here is from."""
        policies = [labelled(version) for version, _ in spans]
        taken, span = [], 0
        for at in range(self._given, len(self._tokens)):
            while span + 1 < len(spans) and spans[span + 1][1] <= at:
                span += 1
            taken.append(SampledToken(self._index, self._tokens[at], self._logprobs[at], policies[span]))
        self._given = len(self._tokens)
        return taken
