"""The catalogue of subjects is consistent with itself, and only valid tokens become subjects."""

from itertools import combinations

import pytest

from contracts import subjects
from contracts.messages import MESSAGES, Claim, Message
from contracts.subjects import CHANNELS, STREAMS, TASK, TASK_WORKERS

PARTIES = {*subjects.SERVICES, "downstream", "operators", "all"}


def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, a last `>` is one or more."""
    ours, theirs = pattern.split("."), subject.split(".")
    for position, token in enumerate(ours):
        if token == ">":
            return len(theirs) > position
        if position >= len(theirs) or token not in ("*", theirs[position]):
            return False
    return len(ours) == len(theirs)


def example(channel: subjects.Channel) -> str:
    return channel.subject(**dict.fromkeys(channel.parameters, "x-1"))


def test_names_are_unique():
    for items in (CHANNELS, STREAMS):
        names = [item.name for item in items]
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_a_channel_lies_in_its_stream_and_in_no_other(channel):
    subject = example(channel)
    holders = [stream.name for stream in STREAMS if any(matches(pattern, subject) for pattern in stream.subjects)]
    assert holders == ([channel.stream] if channel.stored else [])


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
def test_a_channel_carries_the_major_version_and_a_known_message_between_known_parties(channel):
    assert channel.template.startswith(f"tailrace.v{Message.MAJOR}.")
    assert channel.message in MESSAGES
    assert channel.publishers and {*channel.publishers, *channel.consumers} <= PARTIES


def test_every_message_has_a_channel():
    # a claim stands on any subject, in place of the message it points to
    assert {channel.message for channel in CHANNELS} | {Claim} == set(MESSAGES)


def test_subjects_of_different_channels_never_collide():
    for one, other in combinations(CHANNELS, 2):
        assert not matches(one.filter(), example(other)) and not matches(other.filter(), example(one))


def test_a_filter_matches_what_its_channel_publishes():
    subject = TASK.subject(run="demo", purpose="train", pool="default")
    assert subject == "tailrace.v1.demo.task.train.default"
    assert TASK.filter(run="demo", purpose="train") == "tailrace.v1.demo.task.train.*"
    assert matches(TASK.filter(run="demo"), subject) and not matches(TASK.filter(run="other"), subject)


@pytest.mark.parametrize("token", ["", "a.b", "*", ">", "A", "a b", "a\n", "ä", "../x", "{run}"])
def test_a_token_that_could_change_the_subject_is_refused(token):
    with pytest.raises(ValueError, match="subject token"):
        TASK.subject(run=token, purpose="train", pool="default")
    with pytest.raises(ValueError, match="subject token"):
        TASK.filter(run=token)


def test_a_missing_or_unknown_token_is_named():
    with pytest.raises(ValueError, match="pool"):
        TASK.subject(run="demo", purpose="train")
    with pytest.raises(ValueError, match="colour"):
        TASK.subject(run="demo", purpose="train", pool="default", colour="red")
    with pytest.raises(ValueError, match="colour"):
        TASK.filter(colour="red")


def test_work_has_one_consumer_and_pushes_back_on_its_publishers():
    stream = next(stream for stream in STREAMS if stream.name == TASK.stream)
    assert (stream.retention, stream.discard) == ("workqueue", "new")
    assert TASK_WORKERS.name(run="demo", purpose="train", pool="default") == "demo-train-default"


def test_every_stream_is_bounded():
    for stream in STREAMS:
        assert stream.max_bytes > 0 and stream.max_age > 0 and stream.duplicate_window <= stream.max_age
