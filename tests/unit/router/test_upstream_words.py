"""What upstreams say: failures, times to wait, and usage."""

import pytest

from router.chat import Usage
from router.pools.base import Fault
from router.pools.counting import completed, decode, encode, prompt_tokens, spoken, usage_of
from router.pools.faults import error_object, failure, fault_of, retry_after


@pytest.mark.parametrize(
    "status,error,fault",
    [
        (429, {}, Fault.RATE_LIMITED),
        (500, {}, Fault.UNAVAILABLE),
        (502, {}, Fault.UNAVAILABLE),
        (503, {"type": "invalid_request_error"}, Fault.UNAVAILABLE),
        (504, {}, Fault.UNAVAILABLE),
        (529, {"type": "overloaded_error"}, Fault.UNAVAILABLE),
        (302, {}, Fault.UNAVAILABLE),
        (400, {"message": "temperature must be below 2"}, Fault.REFUSED),
        (422, {}, Fault.REFUSED),
        (401, {}, Fault.UNAUTHORISED),
        (403, {}, Fault.UNAUTHORISED),
        (404, {"message": "The model does not exist"}, Fault.UNAUTHORISED),
        (408, {}, Fault.TIMEOUT),
        (413, {}, Fault.TOO_LONG),
        # a prompt that is too long, in the words of several servers
        (400, {"code": "context_length_exceeded"}, Fault.TOO_LONG),
        (400, {"message": "This model's maximum context length is 65536 tokens. However, …"}, Fault.TOO_LONG),
        (400, {"message": "the request exceeds the available context size"}, Fault.TOO_LONG),
        (400, {"message": "prompt is too long: 92208 tokens > 65536 maximum"}, Fault.TOO_LONG),
        (422, {"message": "Too many tokens: …"}, Fault.TOO_LONG),
        (400, {"message": "Please reduce the length of the messages or completion."}, Fault.TOO_LONG),
        (400, {"message": "The input token count (70000) exceeds the maximum"}, Fault.TOO_LONG),
        (500, {"message": "context length"}, Fault.UNAVAILABLE),
        # inside a 200, the error alone speaks
        (200, {"message": "something"}, Fault.BROKEN),
        (200, {"code": 429}, Fault.RATE_LIMITED),
        (200, {"code": 502}, Fault.UNAVAILABLE),
        (200, {"code": "rate_limit_exceeded"}, Fault.RATE_LIMITED),
        (200, {"type": "overloaded_error"}, Fault.UNAVAILABLE),
        (200, {"code": "context_length_exceeded"}, Fault.TOO_LONG),
        (200, {"type": "invalid_request_error"}, Fault.REFUSED),
    ],
)
def test_faults(status, error, fault):
    assert fault_of(error, status) is fault


@pytest.mark.parametrize(
    "document,error",
    [
        ({"error": {"message": "no"}}, {"message": "no"}),
        ({"error": "no"}, {"message": "no"}),
        ({"object": "error", "message": "no"}, {"object": "error", "message": "no"}),
        ({"error": None, "choices": []}, None),
        ({"error": {}}, None),
        ({"choices": []}, None),
        (["error"], None),
    ],
)
def test_errors_are_found_whatever_their_dress(document, error):
    assert error_object(document) == error


def test_only_the_applications_own_faults_speak_in_the_upstreams_words():
    words = {"message": "bad schema", "type": "invalid_request_error", "param": "tools", "code": None}
    refused = failure("cloud", words, status=400)
    assert (str(refused), refused.body) == ("bad schema", words)
    secret = failure("cloud", {"message": "organisation org-123 owes 7 dollars"}, status=401)
    assert "org-123" not in str(secret) and secret.body is None


@pytest.mark.parametrize(
    "headers,expected",
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "7", "retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 90.0),
        ({"retry-after": "Thu, 01 Jan 1970 00:00:05 GMT"}, 0.0),  # over
        # by the upstream's own clock
        ({"retry-after": "Sun, 06 Nov 2033 08:49:47 GMT", "date": "Sun, 06 Nov 2033 08:49:37 GMT"}, 10.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-5"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": ""}, None),
    ],
)
def test_retry_after(headers, expected):
    assert retry_after(headers, now=10.0) == expected


@pytest.mark.parametrize(
    "reported,expected",
    [
        (None, None),
        ("many", None),
        ({}, Usage()),
        ({"prompt_tokens": 10, "completion_tokens": 3}, Usage(10, 3)),
        ({"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}, Usage(10, 3, 8)),
        ({"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": None}, Usage(10, 3)),
        ({"prompt_tokens": 10, "completion_tokens": 3, "prompt_cache_hit_tokens": 4}, Usage(10, 3, 4)),
        (
            {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 99}},
            Usage(10, 3, 10),
        ),
        ({"prompt_tokens": 10, "completion_tokens": 3, "cache_creation_input_tokens": 9}, Usage(10, 3, 0, 9)),
        ({"prompt_tokens": -1, "completion_tokens": True}, Usage()),
        ({"prompt_tokens": 1e9, "completion_tokens": 2**80}, Usage()),
        ({"prompt_tokens": "10", "completion_tokens": None}, Usage()),
    ],
)
def test_usage_is_taken_where_it_makes_sense(reported, expected):
    assert usage_of(reported) == expected


BODY = {"messages": [{"role": "user", "content": "x" * 350}]}


@pytest.mark.parametrize(
    "reported,size,estimated,completion",
    [
        (Usage(10, 3), 35, False, 3),
        (Usage(10, 0), 0, False, 0),
        (Usage(0, 0), 35, True, 10),
        (None, 35, True, 10),
        (None, 1, True, 1),  # what was said is never free
        (None, 0, True, 0),
        (Usage(10, 0), 35, True, 10),
        (Usage(0, 3), 35, True, 3),
    ],
)
def test_what_the_pool_does_not_say_is_counted(reported, size, estimated, completion):
    usage = completed(reported, BODY, size)
    assert (usage.estimated, usage.completion) == (estimated, completion)
    assert usage.prompt == (reported.prompt if reported and reported.prompt else prompt_tokens(BODY)) > 0


@pytest.mark.parametrize(
    "message,size",
    [
        ({"content": "four"}, 4),
        ({"content": "漢字"}, 6),
        ({"content": "\ud83d"}, 1),
        ({"content": None}, 0),
        ({"reasoning_content": "hmm", "content": ""}, 3),
        ({"tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}, {"function": None}, None]}, 4),
        ({"function_call": {"name": "ls", "arguments": "{}"}}, 4),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "ls", "input": "-l"}}]}, 4),
        ({"tool_calls": 7, "function_call": "ls"}, 0),
        ({}, 0),
    ],
)
def test_everything_that_was_sampled_counts(message, size):
    assert spoken(message) == size


PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1_000_000}}


@pytest.mark.parametrize(
    "content,expected",
    [
        ("x" * 350, 104),
        ([{"type": "text", "text": "x" * 350}], 104),
        ([PICTURE], 769),  # not the length of its data
        ([{"type": "tool_result", "content": "x" * 350}], 104),
        ([{"type": "tool_result", "content": [{"type": "text", "text": "x" * 350}, PICTURE]}], 869),
        ([{"type": "tool_use", "name": "x" * 346, "input": {}}, {"type": "refusal", "refusal": "no"}], 104),
        (None, 4),
    ],
)
def test_a_prompt_is_counted_part_by_part(content, expected):
    assert prompt_tokens({"messages": [{"role": "user", "content": content}]}) == expected


def test_usage_is_told_in_openais_shape():
    assert usage_of(Usage(10, 3, 8).body()) == Usage(10, 3, 8)
    assert Usage(10, 3).body()["total_tokens"] == 13


def test_json_that_is_not_quite_clean_passes():
    assert decode(b'{"a": "\\ud83d"}') == {"a": "\ud83d"}
    assert decode(b'"\xff"') == "\ufffd"
    assert encode({"a": "\ud83d x"}) == b'{"a":"? x"}'
    for broken in (b"", b"{", b"nonsense", b"[" * 100_000, b'["\\ud83d",' + b"[" * 100_000):
        with pytest.raises(ValueError):
            decode(broken)
