"""What a generator measures, on the process's meter provider."""

from __future__ import annotations

from infra.instruments import LONG_BUCKETS, gauge, histogram

REWARD_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


def reward(value: float, environment: str) -> None:
    """Reward of one scored rollout."""
    histogram("tailrace.rollout.reward", "1", "Reward of a scored rollout", REWARD_BUCKETS).record(
        value, {"tailrace.environment": environment}
    )


def idle(ratio: float) -> None:
    """Share of wall time since the first training task in which the engine had nothing to compute."""
    gauge("tailrace.generator.idle_ratio", "1", "Share of time not spent computing").set(ratio)


def weights_applied(seconds: float) -> None:
    """Time from a policy's announcement until the engine samples with it."""
    histogram("tailrace.weights.apply_seconds", "s", "Time to take over a policy", LONG_BUCKETS).record(seconds)
