"""Which sampled policies the current weights descend from. Pure."""

from __future__ import annotations

from contracts.messages import PolicyRef


class Lineage:
    """The learner generations of a run and the version at which each took over from the one before.

    A learner that restarts from an older checkpoint continues at that version under a new generation; what the former
    generation published beyond it was trained into weights that no longer exist.
    """

    def __init__(self, starts: list[tuple[int, int]]) -> None:
        """`starts`: (generation, first version) in ascending order; the last one is the current learner."""
        self.starts = starts

    def extended(self, generation: int, version: int) -> Lineage:
        """The lineage of a learner of `generation` that continues from `version`.

        Generations in between continued from there as well: one that had got further would have left a checkpoint.
        """
        newer = range(self.starts[-1][0] + 1, generation + 1)
        return Lineage([*self.starts, *((each, version) for each in newer)])

    def staleness(self, policy: PolicyRef, version: int) -> int | None:
        """Versions between `policy` and the learner's `version`; None if the weights do not descend from `policy`."""
        limit = version
        for generation, start in reversed(self.starts):
            if policy.generation == generation:
                return version - policy.version if start <= policy.version <= limit else None
            limit = min(limit, start)
        return None
