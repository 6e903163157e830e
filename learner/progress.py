"""When a run cannot get anywhere: prompt after prompt is lost for a reason that repeating cannot mend. Pure."""

from __future__ import annotations

from contracts.messages import Reason
from learner.groups import Drop

HOPELESS = (Reason.TASK_EXPIRED, Reason.OVER_BUDGET, Reason.UNSCORED, Reason.FOREIGN_TOKENS)


class Progress:
    """Counts the prompts lost since the last batch."""

    def __init__(self, limit: int) -> None:
        self.limit = limit  # prompts in a row
        self._lost: set[str] = set()

    def made(self) -> None:
        """A batch was there: whatever is lost now and then does not matter."""
        self._lost.clear()

    def hopeless(self, drop: Drop) -> str | None:
        """Take note of a drop; the sentence for a person once more than `limit` prompts in a row gave nothing."""
        if drop.reason in HOPELESS:
            self._lost.add(drop.task_id)
        if len(self._lost) <= self.limit:
            return None
        return f"{self.limit} prompts in a row gave nothing to train on; the last, {drop.reason}: {drop.detail}"
