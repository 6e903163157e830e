"""What the learner measures, on the process's meter provider."""

from __future__ import annotations

from infra.instruments import counter, gauge, histogram

STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


def staleness(versions: int) -> None:
    """Learner version at consumption minus version of a rollout's oldest token."""
    histogram("tailrace.policy.staleness", "{version}", "Age of a trained rollout", STALENESS_BUCKETS).record(versions)


def discarded(count: int, reason: str) -> None:
    """Rollouts that became no gradient."""
    counter("tailrace.discarded", "{rollout}", "Rollouts that became no gradient").add(
        count, {"tailrace.reason": reason}
    )


def idle(ratio: float) -> None:
    """Share of wall time since the first training task in which the learner did not compute."""
    gauge("tailrace.learner.idle_ratio", "1", "Share of time not spent computing").set(ratio)


def target(groups: int) -> None:
    """Groups that the learner's load controller lets be under way."""
    gauge("tailrace.learner.target", "{group}", "Groups that may be under way").set(groups)
