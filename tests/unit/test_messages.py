"""Messages whose fields contradict each other are refused by name, and golden messages stay readable by any client."""

import struct
from dataclasses import dataclass

import msgpack
import msgspec
import numpy as np
import pytest

from contracts import codec
from contracts import messages as m
from contracts.errors import InvalidMessage
from contracts.examples import EXAMPLES, NEWER_POLICY, POLICY
from contracts.policies import TensorSpec
from contracts.tensors import MAX_DIMENSIONS, Tensor
from infra.cli.contracts import GOLDEN

ROLLOUT: m.Rollout = EXAMPLES["rollout"]  # type: ignore[assignment]
POLICY_VERSION: m.PolicyVersion = EXAMPLES["policy_version"]  # type: ignore[assignment]
PATCHED: m.PolicyVersion = EXAMPLES["policy_version-patched"]  # type: ignore[assignment]
STEP: m.StepReport = EXAMPLES["step_report"]  # type: ignore[assignment]
TASK: m.Task = EXAMPLES["task"]  # type: ignore[assignment]
DECISION: m.RouteDecision = EXAMPLES["route_decision"]  # type: ignore[assignment]
OUTCOME: m.RouteOutcome = EXAMPLES["route_outcome"]  # type: ignore[assignment]
FEEDBACK: m.Feedback = EXAMPLES["feedback"]  # type: ignore[assignment]
TRAFFIC: m.Task = EXAMPLES["task-traffic"]  # type: ignore[assignment]
PROMOTION: m.Promotion = EXAMPLES["promotion"]  # type: ignore[assignment]
TOKENS: m.Tokens = EXAMPLES["tokens"]  # type: ignore[assignment]
BLOB: m.BlobManifest = EXAMPLES["blob_manifest"]  # type: ignore[assignment]


def ints(*values: int) -> Tensor:
    return Tensor.of(np.array(values, np.int32))


def floats(*values: float) -> Tensor:
    return Tensor.of(np.array(values, np.float32))


def mask(*values: int) -> Tensor:
    return Tensor.of(np.array(values, np.uint8))


def segments(*starts: int) -> list[m.PolicySegment]:
    return [m.PolicySegment(start=start, policy=POLICY) for start in starts]


@dataclass
class Case:
    message: m.Message
    changes: dict
    word: str  # in the sentence


REFUSED = {
    "task: no completions asked for": Case(TASK, {"group_size": 0}, "group_size"),
    "task: a negative seed": Case(TASK, {"seed": -1}, "seed"),
    "task: a run that is no subject token": Case(TASK, {"run": "a.b"}, "run"),
    "task: an empty run": Case(TASK, {"run": ""}, "run"),
    "task: nothing may be sampled": Case(TASK, {"sampling": m.Sampling(max_tokens=0)}, "max_tokens"),
    "task: a negative temperature": Case(TASK, {"sampling": m.Sampling(max_tokens=1, temperature=-0.1)}, "temperature"),
    "task: a boiling temperature": Case(TASK, {"sampling": m.Sampling(max_tokens=1, temperature=100.0)}, "temperature"),
    "task: no nucleus": Case(TASK, {"sampling": m.Sampling(max_tokens=1, top_p=0.0)}, "top_p"),
    "task: more than everything": Case(TASK, {"sampling": m.Sampling(max_tokens=1, top_p=1.01)}, "top_p"),
    "task: a negative top-k": Case(TASK, {"sampling": m.Sampling(max_tokens=1, top_k=-1)}, "top_k"),
    "rollout: an id of another task": Case(ROLLOUT, {"id": "other.0"}, "member 0"),
    "rollout: an index outside its group": Case(ROLLOUT, {"index": 8, "id": "demo.2.41.8"}, "member 8 of 8"),
    "rollout: tokens of another dtype": Case(
        ROLLOUT, {"tokens": Tensor.of(np.ones(8, np.int64))}, "tokens must be int32"
    ),
    "rollout: tokens with two axes": Case(ROLLOUT, {"tokens": Tensor.of(np.ones((2, 4), np.int32))}, "tokens"),
    "rollout: a scalar for tokens": Case(ROLLOUT, {"tokens": Tensor.of(np.array(1, np.int32))}, "tokens"),
    "rollout: no tokens": Case(ROLLOUT, {"tokens": ints()}, "loss_mask"),
    "rollout: a shorter mask": Case(
        ROLLOUT, {"loss_mask": mask(0, 0, 0, 0, 0, 1, 1)}, r"loss_mask must be uint8 \[8\]"
    ),
    "rollout: a shape its bytes do not fill": Case(
        ROLLOUT, {"tokens": Tensor("int32", [9], ROLLOUT.tokens.data)}, "needs 36 bytes, got 32"
    ),
    "rollout: a negative dimension": Case(ROLLOUT, {"tokens": Tensor("int32", [-8], ROLLOUT.tokens.data)}, "negative"),
    "rollout: two negative dimensions": Case(
        ROLLOUT, {"logprobs": Tensor("float32", [-2, -4], ROLLOUT.logprobs.data)}, "negative"
    ),
    "rollout: an unknown dtype": Case(ROLLOUT, {"logprobs": Tensor("float8", [8], bytes(8))}, "float8"),
    "rollout: a negative token": Case(ROLLOUT, {"tokens": ints(1, 2, 3, 4, 5, 6, 7, -8)}, "token ids"),
    "rollout: a mask of twos": Case(ROLLOUT, {"loss_mask": mask(0, 0, 0, 0, 0, 2, 2, 2)}, "mask"),
    "rollout: a mask over the prompt": Case(ROLLOUT, {"loss_mask": mask(0, 0, 0, 0, 1, 1, 1, 1)}, "mask"),
    "rollout: a mask that starts late": Case(ROLLOUT, {"loss_mask": mask(0, 0, 0, 0, 0, 0, 1, 1)}, "mask"),
    "rollout: nothing sampled": Case(ROLLOUT, {"loss_mask": mask(*[0] * 8)}, "mask"),
    "rollout: NaN log-probs": Case(ROLLOUT, {"logprobs": floats(0, 0, 0, 0, 0, np.nan, 0, 0)}, "finite"),
    "rollout: infinite log-probs": Case(ROLLOUT, {"logprobs": floats(0, 0, 0, 0, 0, -np.inf, 0, 0)}, "finite"),
    "rollout: positive log-probs": Case(ROLLOUT, {"logprobs": floats(0, 0, 0, 0, 0, 0.01, 0, 0)}, "above 0"),
    "rollout: NaN temperatures": Case(ROLLOUT, {"temperatures": floats(0, 0, 0, 0, 0, np.nan, 1, 1)}, "finite"),
    "rollout: infinite temperatures": Case(ROLLOUT, {"temperatures": floats(0, 0, 0, 0, 0, np.inf, 1, 1)}, "finite"),
    "rollout: negative temperatures": Case(ROLLOUT, {"temperatures": floats(0, 0, 0, 0, 0, -1, 1, 1)}, "below 0"),
    "rollout: all of it prompt": Case(ROLLOUT, {"prompt_length": 8}, "prompt_length"),
    "rollout: no prompt": Case(ROLLOUT, {"prompt_length": 0}, "prompt_length"),
    "rollout: no segments": Case(ROLLOUT, {"segments": []}, "segments"),
    "rollout: a segment in the prompt": Case(ROLLOUT, {"segments": segments(4)}, "segments"),
    "rollout: a segment missing at the start": Case(ROLLOUT, {"segments": segments(6)}, "segments"),
    "rollout: segments out of order": Case(ROLLOUT, {"segments": segments(5, 7, 6)}, "segments"),
    "rollout: a segment twice": Case(ROLLOUT, {"segments": segments(5, 5)}, "segments"),
    "rollout: a segment after the end": Case(ROLLOUT, {"segments": segments(5, 8)}, "segments"),
    "rollout: a NaN reward": Case(ROLLOUT, {"reward": np.nan}, "reward"),
    "rollout: an infinite part": Case(ROLLOUT, {"reward_parts": {"a": np.inf}}, "reward"),
    "rollout: a teacher's context of floats": Case(ROLLOUT, {"teacher_tokens": floats(1)}, "teacher_tokens"),
    "rollout: a negative teacher token": Case(ROLLOUT, {"teacher_tokens": ints(-1)}, "teacher"),
    "blob: too few chunks": Case(BLOB, {"chunks": 2}, "not 2 x"),
    "blob: a chunk too many": Case(BLOB, {"chunks": 4}, "not 4 x"),
    "blob: empty chunks": Case(BLOB, {"chunk_bytes": 0}, "chunk_bytes"),
    "policy: a gap between tensors": Case(POLICY_VERSION, {"tensors": POLICY_VERSION.tensors[1:]}, "starts at byte"),
    "policy: bytes beyond its tensors": Case(POLICY_VERSION, {"size": 2_000_001}, "end at byte 2000000 of 2000001"),
    "policy: an unknown dtype": Case(
        POLICY_VERSION, {"tensors": [TensorSpec(name="a", dtype="int3", shape=[1], offset=0)]}, "int3"
    ),
    "policy: too many dimensions": Case(
        POLICY_VERSION, {"tensors": [TensorSpec(name="a", dtype="int32", shape=[1] * 17, offset=0)]}, "dimensions"
    ),
    "policy: a keyframe without patches": Case(PATCHED, {"patches": []}, "go together"),
    "policy: patches without a keyframe": Case(PATCHED, {"keyframe": None}, "go together"),
    "policy: patches of another policy": Case(PATCHED, {"patches": PATCHED.patches[:1]}, "lead to another policy"),
    "policy: patches out of order": Case(
        PATCHED, {"patches": [PATCHED.patches[1], *PATCHED.patches]}, "patches are out of order"
    ),
    "policy: patches of another generation": Case(
        PATCHED, {"keyframe": m.PolicyRef(1, 11, "a" * 64)}, "lead to another policy"
    ),
    "policy: patches larger than the weights": Case(
        PATCHED,
        {"patches": [PATCHED.patches[0], msgspec.structs.replace(PATCHED.patches[1], size=1 << 60)]},
        "more than its 1800000 bytes",
    ),
    "step: rewards of other rollouts": Case(STEP, {"rewards": [1.0]}, "differ in length"),
    "step: a NaN loss": Case(STEP, {"loss": np.nan}, "finite"),
    "step: an infinite metric": Case(STEP, {"metrics": {"kl": np.inf}}, "finite"),
    "decision: a NaN feature": Case(DECISION, {"features": {"length": np.nan}}, "finite"),
    "decision: more than certain": Case(DECISION, {"propensity": 1.01}, "propensity"),
    "outcome: another cost than its attempts'": Case(OUTCOME, {"cost": 1}, "another sum"),
    "outcome: a negative counterfactual": Case(OUTCOME, {"counterfactual": -1}, "counterfactual"),
    "outcome: infinite seconds": Case(OUTCOME, {"seconds": np.inf}, "finite"),
    "feedback: that says nothing": Case(FEEDBACK, {"score": None, "passed": None, "correction": ""}, "says neither"),
    "task: tokens to many subjects": Case(TRAFFIC, {"reply": ">"}, "reply"),
    "promotion: a policy of another run": Case(PROMOTION, {"run": "other"}, "one of run demo"),
    "promotion: a policy that contradicts itself": Case(
        PROMOTION, {"version": msgspec.structs.replace(PROMOTION.version, size=1)}, "of 1"
    ),
    "tokens: a log-prob too few": Case(TOKENS, {"logprobs": [-1.0]}, "differ in length"),
    "tokens: a NaN log-prob": Case(TOKENS, {"logprobs": [np.nan] * 4}, "finite"),
    "tokens: sampled by nobody": Case(TOKENS, {"policy": None}, "no policy"),
    "tokens: of no attempt": Case(TOKENS, {"attempt": 0}, "attempt"),
    "feedback: a score above 1": Case(FEEDBACK, {"score": 1.5}, "score"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_message_that_contradicts_itself_is_refused_on_both_sides(name):
    case = REFUSED[name]
    message = msgspec.structs.replace(case.message, **case.changes)
    with pytest.raises(InvalidMessage, match=case.word):
        codec.encode(message)
    published = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=lambda x: x.item()))
    with pytest.raises(InvalidMessage, match=case.word):
        codec.decode(published, type(message))


ALLOWED = {
    "an unknown purpose": {"purpose": "audit"},
    "an unknown outcome": {"outcome": "abstained"},
    "no reward": {"reward": None},
    "a log-prob that rounding put above 0": {"logprobs": floats(0, 0, 0, 0, 0, 1e-4, 0, 0)},
    "a tool result between sampled tokens": {"loss_mask": mask(0, 0, 0, 0, 0, 1, 0, 1)},
    "greedy sampling": {"temperatures": floats(*[0] * 8)},
    "an empty teacher's context": {"teacher_tokens": ints()},
    "empty text": {"completion": ""},
}


@pytest.mark.parametrize("name", ALLOWED)
def test_readers_accept_what_the_contract_leaves_open(name):
    rollout = msgspec.structs.replace(ROLLOUT, **ALLOWED[name])
    assert codec.decode(codec.encode(rollout), m.Rollout) == rollout


def test_staleness_is_counted_from_the_oldest_policy():
    assert ROLLOUT.oldest == POLICY
    assert EXAMPLES["rollout-swapped"].oldest == POLICY  # type: ignore[attr-defined]
    restarted = m.PolicyRef(generation=3, version=0, digest=NEWER_POLICY.digest)
    assert POLICY < NEWER_POLICY < restarted


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64", "float16", "float32", ">i4", ">f4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_an_array_survives_the_wire(dtype, shape):
    array = np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
    tensor = Tensor.of(array)
    tensor.check("array")
    assert (tensor.array() == array).all() and tensor.array().shape == shape
    assert not tensor.array().flags.writeable


def test_arrays_without_a_wire_type_are_refused():
    with pytest.raises(InvalidMessage, match="float64"):
        Tensor.of(np.zeros(3))
    with pytest.raises(InvalidMessage, match="numpy"):
        Tensor("bfloat16", [1], bytes(2)).array()
    with pytest.raises(InvalidMessage, match="dimensions"):
        Tensor("uint8", [1] * (MAX_DIMENSIONS + 1), b"\0").check("array")


# What a client without our types finds in the golden messages: written out by hand, not derived from the examples.
READ_BY_ANY_CLIENT = {
    "task": {
        "type": "task",
        "v": 1,
        "id": "demo.2.41",
        "run": "demo",
        "purpose": "train",
        "environment": "quick-facts",
        "seed": 1000041,
        "group_size": 8,
        "sampling": {"max_tokens": 16, "temperature": 1.0, "top_p": 0.95, "top_k": 50, "stop": ["\n"]},
        "split": "train",
        "generation": 2,
        "min_version": 9,
        "issued_ns": 1790000000000000000,
    },
    "task-evaluation": {"type": "task", "purpose": "eval", "split": "heldout", "min_version": 0},
    "rollout": {
        "type": "rollout",
        "v": 1,
        "id": "demo.2.41.0",
        "task_id": "demo.2.41",
        "index": 0,
        "tokens": {
            "dtype": "int32",
            "shape": [8],
            "data": struct.pack("<8i", 65, 42, 216, 39, 100000, 216, 39, 198),
        },
        "loss_mask": {"dtype": "uint8", "shape": [8], "data": b"\0\0\0\0\0\1\1\1"},
        "logprobs": {"dtype": "float32", "shape": [8], "data": struct.pack("<8f", 0, 0, 0, 0, 0, -0.25, -1.5, -0.125)},
        "temperatures": {"dtype": "float32", "shape": [8], "data": struct.pack("<8f", 0, 0, 0, 0, 0, 1, 1, 1)},
        "prompt_length": 5,
        "finish": "stop",
        "outcome": "ok",
        "reward": 1.0,
        "reward_parts": {"correct": 1.0, "format": 0.0},
        "completion": " 73",
        "sanitised": False,
        "teacher_tokens": None,
    },
    "rollout-swapped": {
        "teacher_tokens": {"dtype": "int32", "shape": [7], "data": struct.pack("<7i", 65, 42, 216, 39, 17, 9, 8)},
    },
    "rollout-unscored": {
        "outcome": "verifier_timeout",
        "reward": None,
        "completion": " 7\ufffd → 数",
        "sanitised": True,
    },
    "discard": {"type": "discard", "reason": "stale", "rollout_ids": ["demo.2.40.0", "demo.2.40.3"], "version": 12},
    "blob_manifest": {"type": "blob_manifest", "size": 2_000_000, "chunk_bytes": 921_600, "chunks": 3},
    "claim": {"type": "claim", "schema": "rollout/1", "size": 1_734_112},
    "policy_version": {"type": "policy_version", "run": "demo", "size": 2_000_000},
    "policy_version-patched": {"type": "policy_version", "size": 1_800_000},
    "policy_version-first": {"parent": None, "tensors": [], "size": 0},
    "step_report": {"type": "step_report", "step": 13, "staleness": [0, 3], "loss": -0.0625, "learning_rate": 2e-5},
    "generator_report": {"type": "generator_report", "outcomes": {"ok": 410, "wrong": 228, "verifier_timeout": 2}},
    "heartbeat": {"type": "heartbeat", "service": "generator", "state": "ready"},
    "dead_letter": {"type": "dead_letter", "code": "malformed", "payload": b"\x00\xff", "sequence": 977},
    "route_request": {"type": "route_request", "id": "ask-7", "run": "demo", "key": "build-bots", "session": ""},
    "route_decision": {
        "type": "route_decision",
        "request_id": "req-5f0c",
        "pool": "small",
        "order": ["large"],
        "scores": {
            "small": {"success": 0.9375, "cost": 73_600_000},
            "large": {"success": 0.96875, "cost": 4_150_000_000},
        },
        "propensity": 0.9921875,
        "policy": "7",
        "error": "",
    },
    "route_decision-refused": {"pool": "", "reason": "refused", "scores": {}},
    "route_outcome": {
        "type": "route_outcome",
        "request_id": "req-5f0c",
        "status": "ok",
        "cost": 2_406_560_000,
        "counterfactual": 2_100_000_000,
    },
    "task-traffic": {
        "purpose": "serve",
        "environment": "serve",
        "reply": "9f1c04d2a7b35e68",
        "deadline_ns": 1790000060000000000,
        "tools": '[{"type":"function","function":{"name":"weather","parameters":{"type":"object"}}}]',
        "turns": [
            {"role": "user", "content": "How warm is it in Bergen?", "tool_calls": "", "tool_call_id": ""},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": '[{"id":"call-1","type":"function","function":{"name":"weather",'
                '"arguments":"{\\"city\\":\\"Bergen\\"}"}}]',
                "tool_call_id": "",
            },
            {"role": "tool", "content": '{"celsius":11}', "tool_calls": "", "tool_call_id": "call-1"},
        ],
    },
    "rollout-served": {"purpose": "serve", "environment": "serve", "outcome": "pending", "reward": None},
    "promotion": {"type": "promotion", "decided_by": "ada", "override": True},
    "tokens": {
        "type": "tokens",
        "task_id": "chat-5f0c9a3be1d24c7786aa01d3",
        "attempt": 1,
        "index": 0,
        "start": 3,
        "text": " 11 °C",
        "tokens": [216, 33, 9107, 51],
        "pieces": [" ", "11", " °", "C"],
        "logprobs": [-0.25, -1.5, -0.125, 0.0],
        "finish": "",
    },
    "tokens-last": {"finish": "stop", "prompt_tokens": 58, "rollout": "chat-5f0c9a3be1d24c7786aa01d3.0", "tokens": []},
    "tokens-error": {"code": "prompt_too_long"},
    "cancel": {"type": "cancel", "task_id": "chat-5f0c9a3be1d24c7786aa01d3"},
    "feedback": {"type": "feedback", "request_id": "req-5f0c", "score": 0.75, "passed": True, "correction": '{"a": 1}'},
}


@pytest.mark.parametrize("name", READ_BY_ANY_CLIENT)
def test_a_plain_msgpack_client_reads_the_golden_messages(name):
    body = msgpack.unpackb((GOLDEN / f"{name}.msgpack").read_bytes())
    expected = READ_BY_ANY_CLIENT[name]
    assert {key: body[key] for key in expected} == expected
    assert body["v"] == 1


def test_every_golden_message_is_looked_at_and_every_message_type_has_one():
    assert {path.stem for path in GOLDEN.glob("*.msgpack")} == READ_BY_ANY_CLIENT.keys()
    assert {name.split("-")[0] for name in READ_BY_ANY_CLIENT} == {codec.tag_of(kind) for kind in m.MESSAGES}


def test_a_swap_of_weights_in_flight_is_on_record():
    body = msgpack.unpackb((GOLDEN / "rollout-swapped.msgpack").read_bytes())
    assert [(s["start"], s["policy"]["generation"], s["policy"]["version"]) for s in body["segments"]] == [
        (5, 2, 12),
        (7, 2, 13),
    ]
