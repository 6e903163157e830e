"""Sessions: which pool served one last, what of its prompt lies in which prompt cache, and whether it has escalated.

A small bounded memory, without I/O; the clock is passed in. Losing it costs a prompt cache, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from router.pools.base import PoolState

CACHE_SECONDS = 300.0  # prompt caches live for about five minutes after their last use
SESSION_SECONDS = 3600.0
CAPACITY = 20_000  # sessions
LATCH_CALLS = 8  # calls of a session that stay on the strong tier after a verifier refused a compact answer
FIRST_GAP = 15.0  # seconds between two calls of a session, before any were seen
MARGIN = 1.5  # a cache that has not this many gaps to live is taken to be gone before the session comes back to it


@dataclass
class _Cached:
    tokens: int
    at: float  # of its last use
    uses: int = 1


@dataclass
class _Session:
    pool: str
    at: float
    calls: int = 0
    gap: float = FIRST_GAP
    latched: int = 0  # calls that still go to the strong tier
    caches: dict[str, _Cached] = field(default_factory=dict)


@dataclass(frozen=True)
class View:
    """What is known about a session at one moment."""

    pool: str = ""  # that served its last turn
    minimum: str = ""  # tier below which it must not go
    cached: dict[str, int] = field(default_factory=dict)  # pool -> prompt tokens believed to lie in its cache
    expiring: dict[str, float] = field(default_factory=dict)  # pool -> P(needed again, and gone unless used now)

    def known(self, pools: Iterable[PoolState]) -> list[PoolState]:
        """Pools with what this session has cached there."""
        return [
            replace(pool, cached_tokens=self.cached[pool.name], expiring=self.expiring.get(pool.name, 0.0))
            if pool.name in self.cached
            else pool
            for pool in pools
        ]


class Affinity:
    """Sessions by their key, the least recently used one forgotten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._sessions: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def view(self, session: str, now: float) -> View:
        """What is known about a session; nothing where it is new, or too long ago. `now` in monotonic seconds."""
        found = self._found(session, now)
        if found is None:
            return View()
        warm = {name: cache for name, cache in found.caches.items() if now - cache.at < CACHE_SECONDS}
        # A session of k calls goes on with probability k / (k + 1) (Laplace's rule of succession), and needs a pool as
        # often as it has needed it.
        goes_on = found.calls / (found.calls + 1)
        return View(
            pool=found.pool,
            minimum="strong" if found.latched > 0 else "",
            cached={name: cache.tokens for name, cache in warm.items()},
            expiring={
                name: goes_on * cache.uses / max(found.calls, 1)
                for name, cache in warm.items()
                if CACHE_SECONDS - (now - cache.at) < MARGIN * found.gap
            },
        )

    def used(self, session: str, pool: str, prompt_tokens: int, now: float) -> None:
        """A pool has answered this session; its prompt lies in the pool's cache from now on."""
        if not session:
            return
        found = self._found(session, now)
        if found is None:
            found = self._sessions[session] = _Session(pool, now)
            while len(self._sessions) > self._capacity:
                self._sessions.popitem(last=False)
        else:
            found.gap += 0.2 * (max(now - found.at, 0.0) - found.gap)
        found.pool, found.at = pool, now
        found.calls += 1
        found.latched = max(found.latched - 1, 0)
        cache = found.caches.get(pool)
        # A conversation that became shorter was rewritten: what lies in the other caches is another one.
        found.caches = {name: each for name, each in found.caches.items() if each.tokens <= prompt_tokens}
        found.caches[pool] = _Cached(prompt_tokens, now, 1 if cache is None else cache.uses + 1)

    def escalated(self, session: str) -> None:
        """A verifier refused a compact answer in this session: its next calls are not given to compact pools."""
        if session in self._sessions:
            self._sessions[session].latched = LATCH_CALLS

    def _found(self, session: str, now: float) -> _Session | None:
        found = self._sessions.get(session)
        if found is not None and now - found.at >= SESSION_SECONDS:
            del self._sessions[session]
            return None
        if found is not None:
            self._sessions.move_to_end(session)
        return found
