"""Server-sent events: the same whatever the network cut them into."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.pools.sse import Event, Oversized, Parser

STREAMS = {
    "plain": (b"data: one\n\ndata: two\n\n", [b"one", b"two"]),
    "crlf": (b"data: one\r\n\r\ndata: two\r\n\r\n", [b"one", b"two"]),
    "cr": (b"data: one\r\rdata: two\r\r", [b"one", b"two"]),
    "mixed": (b"data: one\r\n\ndata: two\r\r\n", [b"one", b"two"]),
    "comments": (b": ping\n\n: PROCESSING\ndata: one\n: in between\n\n:\n\n", [b"one"]),
    "several lines": (b"data: {\ndata: }\n\n", [b"{\n}"]),
    "no space, two spaces": (b"data:one\n\ndata:  two\n\n", [b"one", b" two"]),
    "empty": (b"data\n\ndata:\n\n", [b"", b""]),
    "other fields": (b"id: 7\nretry: 10\nwhatever\ndata: one\n\n", [b"one"]),
    "byte order mark": (b"\xef\xbb\xbfdata: one\n\n", [b"one"]),
    "utf-8": ("data: héllo 🙂 漢字\n\n".encode(), ["héllo 🙂 漢字".encode()]),
    "no blank line at the end": (b"data: one\n\ndata: [DONE]", [b"one", b"[DONE]"]),
    "one line end at the end": (b"data: one\n\ndata: [DONE]\n", [b"one", b"[DONE]"]),
    "nothing": (b"", []),
}


def events(pieces: list[bytes]) -> list[Event]:
    parser = Parser()
    return [event for piece in pieces for event in parser.feed(piece)] + parser.end()


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
def test_events_do_not_depend_on_how_they_arrive(name, size):
    stream, expected = STREAMS[name]
    pieces = [stream[start : start + size] for start in range(0, len(stream), size)]
    assert [event.data for event in events(pieces)] == expected


@given(st.lists(st.sampled_from(["data: ä🙂", "event: e", ": c", "data:", "", "\r"])), st.data())
def test_any_stream_cut_anywhere_is_the_same(lines, data):
    stream = "".join(line + data.draw(st.sampled_from(["\n", "\r\n", "\r"])) for line in lines).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=8)))
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    assert events(pieces) == events([stream])


def test_an_event_is_given_as_soon_as_it_is_whole():
    parser = Parser()
    assert parser.feed(b"data: one\n") == []
    assert parser.feed(b"\ndata: tw") == [Event(b"one")]
    assert parser.feed(b"o\n\n") == [Event(b"two")]


def test_names_are_of_one_event_only():
    assert events([b"event: error\ndata: {}\n\ndata: x\n\nevent: lost\n\ndata: y\n\n"]) == [
        Event(b"{}", "error"),
        Event(b"x"),
        Event(b"y"),
    ]


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 40, b"data: xxxx\n", b"x" * 40])
def test_an_event_has_a_longest_size(piece):
    parser = Parser(longest=100)
    with pytest.raises(Oversized):
        for _ in range(100):
            parser.feed(piece)


def test_many_events_may_be_longer_together():
    parser = Parser(longest=100)
    assert len(parser.feed(b"data: one\n\n" * 1000)) == 1000
