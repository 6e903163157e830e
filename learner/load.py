"""How many groups to keep under way, so that the learner does not wait and rollouts do not age. Pure."""

from __future__ import annotations

TOLERANCE = 0.01  # of a step's computing time: a shorter wait for its batch is no want of rollouts
WINDOW = 6  # steps over which something must have lain unneeded before it counts as surplus, at first
LONGEST_WINDOW = 48  # and where the learner had to wait again and again


class Load:
    """The gate's target, from two to bound + 1 batches, steered by what each step found.

    Mean staleness is what is under way in batches, beside the batch being trained (Little's law). Where generators are
    the bottleneck most of that are tasks in the queue, which do not age; the learner waits at every step, and the
    target is the limit. Where the learner is, all of it are rollouts that age: what lay ready and unneeded at each
    step of a window is surplus, and half of it is given back. A wait brings a whole batch back at once, and doubles the
    window if anything had been given: that was wrong, so it is tried again more carefully. So the target
    settles where waits are rare: at the batch in training, the next one, and what a high quantile of the service time
    needs beyond them, however that changes with generators that come and go. (To compute the need from measured service
    times goes wrong where these depend on the load: a generator that samples everything it holds at once is slow
    because much is under way, which would keep it much.)

    Two batches is what training one while the next one is sampled takes. With bound 0 the limit is one: synchronous.
    """

    def __init__(self, groups_per_step: int, limit: int) -> None:
        self.groups_per_step = groups_per_step
        self.limit = limit  # groups
        self.target = limit  # groups; nothing is known yet
        self._least = min(2 * groups_per_step, limit)
        self._window = WINDOW
        self._spare: list[int] = []  # of the steps of this window
        self._filling = True

    def stepped(self, *, waited: float, computed: float, spare: int) -> int:
        """Take note of a step and return the target.

        Its batch was waited for `waited` seconds for want of rollouts, it computed for `computed` seconds, and `spare`
        groups were ready beside those that it took. The first step says nothing: the line was empty.
        """
        if self._filling:
            self._filling = False
        elif waited > TOLERANCE * computed:
            if self.target < self.limit:
                self._window = min(2 * self._window, LONGEST_WINDOW)
            self.target = min(self.target + self.groups_per_step, self.limit)
            self._spare.clear()
        else:
            self._spare.append(spare)
            if len(self._spare) >= self._window:
                self.target = max(self.target - (min(self._spare) + 1) // 2, self._least)
                self._window = max(self._window * 3 // 4, WINDOW)
                self._spare.clear()
        return self.target
