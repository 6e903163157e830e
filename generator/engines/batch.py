"""Continuous batching: groups join between two decode steps and leave as they finish. Synchronous, one thread."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor

from contracts.messages import Finish, PolicyRef
from generator.engines.base import EngineError, SampledToken, SampleRequest
from generator.engines.completions import Completion, Decode
from generator.engines.decoder import Decoder, Prefill, draw
from generator.engines.schedule import Demand, Limits, admit

Output = dict[Hashable, list[SampledToken] | EngineError]  # by group key: its tokens of one step, or why it ended


@dataclass(eq=False)
class _Group:
    key: Hashable
    request: SampleRequest
    demand: Demand


@dataclass(eq=False)
class _Entry:
    """One completion and the group it belongs to."""

    group: _Group
    completion: Completion
    finish: Finish | None = None


@dataclass
class _Step:
    """What one step has produced so far, by group key."""

    policy: PolicyRef
    tokens: dict[Hashable, list[SampledToken]] = field(default_factory=dict)
    errors: dict[Hashable, EngineError] = field(default_factory=dict)


class Batch:
    """The groups of one engine: waiting, in prefill, or with their completions in slots.

    A failing step ends the groups that took part in it with an error, and no others.
    """

    def __init__(self, decoder: Decoder, limits: Limits, eos: set[int], decode: Decode) -> None:
        self._decoder, self._limits, self._eos, self._decode = decoder, limits, eos, decode
        self._waiting: deque[_Group] = deque()
        self._prefill: Prefill | None = None
        self._joining: dict[int, _Group] = {}  # by row of the prefill
        self._slots: list[_Entry] = []  # in the order of the decoder's slots

    @property
    def idle(self) -> bool:
        """True when `step` would have nothing to do."""
        return not (self._waiting or self._prefill or self._slots)

    @property
    def inflight(self) -> int:
        """Completions in slots or in prefill."""
        return len(self._slots) + sum(group.request.group_size for group in self._joining.values())

    def keys(self) -> list[Hashable]:
        """Every group that has not ended."""
        groups = [*self._waiting, *self._joining.values(), *(entry.group for entry in self._slots)]
        return list(dict.fromkeys(group.key for group in groups))

    def add(self, key: Hashable, request: SampleRequest) -> None:
        """Queue a group; its tokens come out of `step` under `key`."""
        self._waiting.append(_Group(key, request, Demand.of(request, self._limits.window)))

    def abort(self, key: Hashable) -> None:
        """Forget a group, wherever it is, and free its slots."""
        self._waiting = deque(group for group in self._waiting if group.key != key)
        self._joining = {row: group for row, group in self._joining.items() if group.key != key}
        if not self._joining:
            self._prefill = None
        self._release({key})

    def step(self, policy: PolicyRef) -> Output:
        """One piece of a prefill, if groups can join, and one decode step of everything in slots."""
        step = _Step(policy)
        if self._prefill is None:
            self._admit()
        if self._prefill is not None:
            self._guard(step, [group.key for group in self._joining.values()], self._join)
        if self._slots:
            self._guard(step, [entry.group.key for entry in self._slots], self._go_on)
        return {**step.tokens, **step.errors}

    def _guard(self, step: _Step, keys: list[Hashable], work: Callable[[_Step], None]) -> None:
        try:
            work(step)
        except Exception as error:  # whatever the model raises is the error of the groups that it was computing
            for key in dict.fromkeys(keys):
                step.errors[key] = EngineError(f"sampling failed: {type(error).__name__}: {error}")
                self.abort(key)

    def _admit(self) -> None:
        span = max((entry.group.demand.span for entry in self._slots), default=0)
        count = admit([group.demand for group in self._waiting], len(self._slots), span, self._limits)
        self._joining = {row: self._waiting.popleft() for row in range(count)}
        if self._joining:
            self._prefill = Prefill([group.request.prompt for group in self._joining.values()])

    def _join(self, step: _Step) -> None:
        prefill = self._prefill
        assert prefill is not None
        self._decoder.advance(prefill, self._limits.prefill_tokens)
        if prefill.logits is None:
            return
        rows, entries = [], []
        for row, group in self._joining.items():
            rows += [row] * group.request.group_size
            entries += [self._entry(group, index) for index in range(group.request.group_size)]
        self._accept(step, entries, prefill.logits[rows])
        for row, group in self._joining.items():
            going = [e for e in entries if e.group is group and e.finish is None and group.key not in step.errors]
            if going:
                self._decoder.cache.seat(prefill.cache, row, prefill.lengths[row], len(going))
                self._slots += going
        self._prefill, self._joining = None, {}

    def _go_on(self, step: _Step) -> None:
        completions = [entry.completion for entry in self._slots]
        logits = self._decoder.decode([c.token for c in completions], [c.length for c in completions])
        for completion in completions:
            completion.length += 1
        self._accept(step, self._slots, logits)
        self._release(set(step.errors), poisoned=bool(step.errors))

    def _entry(self, group: _Group, index: int) -> _Entry:
        request = group.request
        return _Entry(
            group,
            Completion(
                index,
                len(request.prompt),
                request.sampling,
                request.seed,
                self._decoder.window,
                self._eos,
                self._decode,
            ),
        )

    def _accept(self, step: _Step, entries: list[_Entry], logits: Tensor) -> None:
        """Draw a token for every entry from its row of `logits`, and note which completions end."""
        samplings = [entry.group.request.sampling for entry in entries]
        tokens, logprobs = draw(logits, samplings, [entry.completion.uniform() for entry in entries])
        for entry, token, logprob in zip(entries, tokens, logprobs, strict=True):
            key, completion = entry.group.key, entry.completion
            if not math.isfinite(logprob):
                version = f"{step.policy.generation}.{step.policy.version}"
                step.errors[key] = EngineError(f"sampling failed: policy {version} gives logits that are not finite")
                continue
            entry.finish = completion.accept(token)
            sampled = SampledToken(completion.index, token, logprob, step.policy, entry.finish)
            step.tokens.setdefault(key, []).append(sampled)

    def _release(self, keys: set[Hashable], *, poisoned: bool = False) -> None:
        """Free the slots of finished completions and of all those of the groups in `keys`."""
        slots = [s for s, entry in enumerate(self._slots) if entry.finish is not None or entry.group.key in keys]
        if slots:
            for source, target in self._decoder.release(slots, poisoned=poisoned):
                self._slots[target] = self._slots[source]
            del self._slots[len(self._slots) - len(slots) :]
