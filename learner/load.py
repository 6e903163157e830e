"""How many groups to keep under way, so that the learner does not wait and rollouts do not age. Pure."""

from __future__ import annotations

TOLERANCE = 0.01  # of a step's computing time: a shorter wait for its batch is no want of rollouts
WINDOW = 8  # steps in a row in which something lay unneeded


class Load:
    """The gate's target, from two to bound + 1 batches, steered by what each step found.

    Mean staleness is what is under way in batches, beside the batch being trained (Little's law). Where generators are
    the bottleneck most of that are tasks in the queue, which do not age; the learner waits at every step, and the
    target is the limit. Where the learner is, all of it are rollouts that age: whatever lay ready and unneeded at
    each of the last `WINDOW` batches is surplus, and half of it is given back; a wait brings a whole batch back at
    once. So the target settles where waits are rare: at the batch in training, the next one, and what a high quantile
    of the service time needs beyond them, whatever that is made of and however it changes with generators that come
    and go. (To compute that need from measured service times instead goes wrong where the time depends on the load: a
    generator that samples everything it holds at once is slow because much is under way, which would keep it much.)

    Two batches is what training one while the next one is sampled takes. With bound 0 the limit is one: synchronous.
    """

    def __init__(self, groups_per_step: int, limit: int) -> None:
        self.groups_per_step = groups_per_step
        self.limit = limit  # groups
        self.target = limit  # groups; nothing is known yet
        self._least = min(2 * groups_per_step, limit)
        self._spare: list[int] = []
        self._filling = True

    def stepped(self, *, waited: float, computed: float, spare: int) -> int:
        """Take note of a step and return the target.

        Its batch was waited for `waited` seconds for want of rollouts, it computed for `computed` seconds, and `spare`
        groups were ready beside those that it took. The first step says nothing: the line was empty.
        """
        if self._filling:
            self._filling = False
        elif waited > TOLERANCE * computed:
            self.target = min(self.target + self.groups_per_step, self.limit)
            self._spare.clear()
        else:
            self._spare.append(spare)
            if len(self._spare) == WINDOW:
                self.target = max(self.target - (min(self._spare) + 1) // 2, self._least)
                self._spare.clear()
        return self.target
