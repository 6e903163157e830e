"""A run that loses every prompt ends with the reason; one that loses some goes on."""

from contracts.messages import Reason
from learner.groups import Drop
from learner.progress import Progress


def drop(number: int, reason: Reason = Reason.TASK_EXPIRED) -> Drop:
    return Drop(f"train-{number}", (), reason, "dead letter: no template")


def test_only_prompts_in_a_row_that_cannot_be_mended_count():
    progress = Progress(3)
    assert [progress.hopeless(drop(number)) for number in (0, 1, 2, 2, 2)] == [None] * 5, "a prompt counts once"
    assert progress.hopeless(drop(9, Reason.STALE)) is None
    progress.made()
    assert [progress.hopeless(drop(number)) for number in (3, 4, 5)] == [None] * 3
    said = progress.hopeless(drop(6))
    assert said is not None and "3 prompts in a row" in said and "no template" in said
