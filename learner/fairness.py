"""Slow prompts are trained as often as fast ones: when a step waits for a group that is still being worked on. Pure."""

from __future__ import annotations

from collections.abc import Mapping


def stragglers(begun: Mapping[str, int], newest: int, version: int, *, bound: int, per_step: int) -> list[str]:
    """Tasks that the step from `version` must wait for; empty where it may be taken.

    `begun` holds the tasks being worked on with the version that each began with; `newest` is the newest version that
    the waiting batch, sorted oldest first, begins with. A group that began with version b can be trained by the steps
    from b to b + bound, and each of them trains `per_step` groups. So once this step is taken, no more than
    (b + bound - version) * per_step of the groups that began with b or before may be left; otherwise some would become
    too stale however well it goes on: the schedulability test of earliest deadline first (Liu and Layland, 1973; here
    with unit jobs). Waiting helps only where the batch holds a younger group, whose place a straggler can take. What is
    too old already is not waited for.
    """
    oldest = version - bound
    waiting = sorted((b, task) for task, b in begun.items() if b >= oldest)
    late = 0
    for count, (b, _) in enumerate(waiting, start=1):
        if b < newest and count > (b - oldest) * per_step:
            late = count
    return [task for _, task in waiting[:late]]
