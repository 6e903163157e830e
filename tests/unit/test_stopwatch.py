"""Idle is wall time since the first task that nothing computed in."""

from learner.stopwatch import Stopwatch


def test_time_is_split_by_state():
    now = 0.0
    watch = Stopwatch(lambda: now)
    now = 5.0
    assert (watch.wall, watch.idle_seconds) == (0.0, 0.0), "nothing counts before the first task"
    watch.start()
    now = 7.0
    with watch.busy("train"):
        now = 10.0
    with watch.idle("publish"):
        now = 11.0
    assert watch.wall == 6.0
    assert watch.idle_seconds == 3.0
    assert watch.lap() == {"train": 3.0, "publish": 1.0, "wait_for_batch": 2.0}
    watch.start()
    assert watch.wall == 6.0, "a second start changes nothing"
    assert watch.lap() == {"wait_for_batch": 0.0}
