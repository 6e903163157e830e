"""The text of an answer while it is sampled: what decoding everything would give, bit by bit, and no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from contracts.messages import Finish
from generator.answers import STRETCH_TOKENS, Stream
from generator.engines import SampledToken
from generator.texts import PENDING, AnswerText, Detokenizer
from tests.unit.builders import policy

Codec = tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]


def byte_level() -> Codec:
    """One token per byte, and merges of some across characters, as GPT-2's kind of tokenizer has them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("a", "b"), ("Ċ", "Ċ"), ("Ã", "¼"), ("ð", "Ł")]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    made = Tokenizer(BPE(vocabulary, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return lambda text: made.encode(text).ids, lambda tokens: made.decode(list(tokens))


def byte_fallback() -> Codec:
    """Words with a mark for the space before them, and bytes for what is not in the vocabulary, as Llama 2 has them."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "a", "b", "▁a", "ab"]
    vocabulary = {token: index for index, token in enumerate(pieces)}
    made = Tokenizer(BPE(vocabulary, [("▁", "a"), ("a", "b")], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return lambda text: made.encode(text).ids, lambda tokens: made.decode(list(tokens))


CODECS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
TEXTS = st.text(alphabet=st.sampled_from("ab \n.üß→数🙂👩\u200d🏽"), max_size=30)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@given(text=TEXTS)
def test_bit_by_bit_it_is_what_decoding_everything_gives(codec: Codec, text: str) -> None:
    encode, decode = codec
    detokenizer, shown = Detokenizer(decode), ""
    for token in encode(text):
        new = detokenizer.push(token)
        assert "\ufffd" not in new, "a character was split"
        shown += new
        assert text.startswith(shown)
    assert shown == text


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_character_that_is_never_completed_is_left_out(codec: Codec) -> None:
    encode, decode = codec
    detokenizer = Detokenizer(decode)
    shown = [detokenizer.push(token) for token in encode("ab 🙂")[:-1]]
    assert "".join(shown) == "ab "


@given(tokens=st.lists(st.integers(0, 255), max_size=60))
def test_bytes_that_are_no_text_stop_nothing(tokens: list[int]) -> None:
    encode, decode = CODECS["byte level"]
    detokenizer = Detokenizer(decode)
    shown = "".join(detokenizer.push(token) for token in [*tokens, *encode("...the end")])
    assert shown.endswith("...the end")


def test_endless_bytes_that_are_no_text_are_given_up_on() -> None:
    encode, decode = CODECS["byte level"]
    start = encode("🙂")[0]
    detokenizer = Detokenizer(decode)
    shown = "".join(detokenizer.push(start) for _ in range(20 * PENDING))
    assert shown.count("\ufffd") > 10 * PENDING


STOPS = {
    "none": ([], "to be or", "to be or"),
    "inside": (["be"], "to be or", "to "),
    "over several tokens": (["\n\n"], "ab\n\nab", "ab"),
    "the earliest counts": (["or", "be"], "to be or", "to "),
    "what only begins like one is shown": (["be!"], "to be or", "to be or"),
    "held back to the end": (["be or not"], "to be or", "to be or"),
    "at once": (["to"], "to be", ""),
    "after a character of several bytes": (["数"], "a🙂数b", "a🙂"),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_string_and_nothing_else_is_cut_off(name: str) -> None:
    stops, text, expected = STOPS[name]
    encode, decode = CODECS["byte level"]
    answer, shown = AnswerText(decode, stops), ""
    for token in encode(text):
        shown += answer.push(token)
        assert expected.startswith(shown), "more was shown than may be"
    assert shown + answer.end() == expected


def test_what_waits_to_be_sent_is_cut_where_the_policy_changes_and_before_it_is_too_large() -> None:
    encode, decode = CODECS["byte level"]
    stream = Stream(AnswerText(decode, []), lambda token: decode([token]))
    (letter,) = encode("a")
    sampled = [policy(1)] * 2 + [policy(2)] * (STRETCH_TOKENS + 1)
    for position, by in enumerate(sampled):
        last = position == len(sampled) - 1
        stream.add(SampledToken(0, letter, -0.5, by, Finish.LENGTH if last else None))
    stretches = stream.take()
    assert [(s.start, len(s.tokens), s.policy.version) for s in stretches] == [
        (0, 2, 1), (2, STRETCH_TOKENS, 2), (2 + STRETCH_TOKENS, 1, 2),
    ]  # fmt: skip
    assert all(s.pieces == ["a"] * len(s.tokens) and s.text == "a" * len(s.tokens) for s in stretches)
    assert not stream.take()
