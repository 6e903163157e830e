"""One realistic message per type and variant: the source of the golden messages and of the examples in the documents.

Keys are the names of the golden files. A new message or variant is a new entry here; an existing one never changes,
because its bytes are promised.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np

from contracts import messages as m
from contracts.tensors import Tensor

START_NS = 1_790_000_000_000_000_000
WEIGHTS = sha256(b"weights of version 12").hexdigest()
NEWER_WEIGHTS = sha256(b"weights of version 13").hexdigest()
BUNDLE = sha256(b"config and tokenizer").hexdigest()

POLICY = m.PolicyRef(generation=2, version=12, digest=WEIGHTS)
NEWER_POLICY = m.PolicyRef(generation=2, version=13, digest=NEWER_WEIGHTS)
KEYFRAME = m.PolicyRef(generation=2, version=11, digest=sha256(b"weights of version 11").hexdigest())
SAMPLING = m.Sampling(max_tokens=16, temperature=1.0, top_p=0.95, top_k=50, stop=["\n"])


def _rollout(
    *,
    index: int,
    segments: list[m.PolicySegment],
    completion: str = " 73",
    outcome: str = m.Outcome.OK,
    reward: float | None = 1.0,
    reward_parts: dict[str, float] | None = None,
    sanitised: bool = False,
    teacher_tokens: Tensor | None = None,
) -> m.Rollout:
    """Five prompt tokens, three sampled ones: `Q: 73 or 41? A:` -> ` 73`."""
    return m.Rollout(
        id=f"demo.2.41.{index}",
        task_id="demo.2.41",
        index=index,
        group_size=8,
        run="demo",
        purpose=m.Purpose.TRAIN,
        environment="quick-facts",
        split=m.Split.TRAIN,
        item=sha256(b"73 or 41").hexdigest(),
        tokens=Tensor.of(np.array([65, 42, 216, 39, 100000, 216, 39, 198], np.int32)),
        loss_mask=Tensor.of(np.array([0, 0, 0, 0, 0, 1, 1, 1], np.uint8)),
        logprobs=Tensor.of(np.array([0, 0, 0, 0, 0, -0.25, -1.5, -0.125], np.float32)),
        temperatures=Tensor.of(np.array([0, 0, 0, 0, 0, 1, 1, 1], np.float32)),
        prompt_length=5,
        segments=segments,
        sampling=SAMPLING,
        finish=m.Finish.STOP,
        outcome=outcome,
        reward=reward,
        reward_parts=reward_parts if reward_parts is not None else {"correct": 1.0, "format": 0.0},
        completion=completion,
        generator="generator-1",
        issued_ns=START_NS,
        started_ns=START_NS + 40_000_000,
        finished_ns=START_NS + 900_000_000,
        sanitised=sanitised,
        teacher_tokens=teacher_tokens,
    )


EXAMPLES: dict[str, m.Message] = {
    "task": m.Task(
        id="demo.2.41",
        run="demo",
        purpose=m.Purpose.TRAIN,
        environment="quick-facts",
        seed=1_000_041,
        group_size=8,
        sampling=SAMPLING,
        generation=2,
        min_version=9,
        issued_ns=START_NS,
    ),
    "task-evaluation": m.Task(
        id="demo.eval.12.7",
        run="demo",
        purpose=m.Purpose.EVAL,
        environment="gym:basic_arithmetic",
        seed=7,
        group_size=1,
        sampling=m.Sampling(max_tokens=64, temperature=0.0),
        split=m.Split.HELDOUT,
    ),
    "rollout": _rollout(index=0, segments=[m.PolicySegment(start=5, policy=POLICY)]),
    "rollout-swapped": _rollout(
        index=1,
        segments=[m.PolicySegment(start=5, policy=POLICY), m.PolicySegment(start=7, policy=NEWER_POLICY)],
        teacher_tokens=Tensor.of(np.array([65, 42, 216, 39, 17, 9, 8], np.int32)),
    ),
    "rollout-unscored": _rollout(
        index=2,
        segments=[m.PolicySegment(start=5, policy=POLICY)],
        completion=" 7\ufffd → 数",
        outcome=m.Outcome.VERIFIER_TIMEOUT,
        reward=None,
        reward_parts={},
        sanitised=True,
    ),
    "discard": m.Discard(
        run="demo",
        task_id="demo.2.40",
        rollout_ids=["demo.2.40.0", "demo.2.40.3"],
        reason=m.Reason.STALE,
        detail="oldest token is of version 7, the learner is at 12, the bound is 4",
        generation=2,
        version=12,
        at_ns=START_NS + 1_000_000_000,
    ),
    "blob_manifest": m.BlobManifest(digest=WEIGHTS, size=2_000_000, chunk_bytes=921_600, chunks=3),
    "claim": m.Claim(schema="rollout/1", digest=sha256(b"a long rollout").hexdigest(), size=1_734_112),
    "policy_version": m.PolicyVersion(
        run="demo",
        policy=NEWER_POLICY,
        tensors=[
            m.TensorSpec(name="model.embed_tokens.weight", dtype="bfloat16", shape=[1000, 900], offset=0),
            m.TensorSpec(name="model.norm.weight", dtype="float32", shape=[50_000], offset=1_800_000),
        ],
        size=2_000_000,
        bundle=BUNDLE,
        parent=POLICY,
        published_ns=START_NS + 1_200_000_000,
    ),
    "policy_version-patched": m.PolicyVersion(
        run="demo",
        policy=NEWER_POLICY,
        tensors=[m.TensorSpec(name="model.embed_tokens.weight", dtype="bfloat16", shape=[1000, 900], offset=0)],
        size=1_800_000,
        bundle=BUNDLE,
        parent=POLICY,
        published_ns=START_NS + 1_200_000_000,
        keyframe=KEYFRAME,
        patches=[
            m.WeightPatch(policy=POLICY, digest=sha256(b"patch 12").hexdigest(), size=14_100),
            m.WeightPatch(policy=NEWER_POLICY, digest=sha256(b"patch 13").hexdigest(), size=13_900),
        ],
    ),
    "policy_version-first": m.PolicyVersion(
        run="demo",
        policy=m.PolicyRef(generation=3, version=0, digest=sha256(b"").hexdigest()),
        tensors=[],
        size=0,
        bundle=BUNDLE,
        parent=None,
        published_ns=START_NS,
    ),
    "step_report": m.StepReport(
        run="demo",
        policy=NEWER_POLICY,
        step=13,
        rollout_ids=["demo.2.41.0", "demo.2.41.1"],
        staleness=[0, 3],
        rewards=[1.0, 0.0],
        groups=2,
        zero_advantage_groups=1,
        tokens=6,
        loss=-0.0625,
        grad_norm=1.75,
        learning_rate=2e-5,
        metrics={"mismatch_kl": 0.00390625, "clip_fraction": 0.0},
        seconds={"wait_for_batch": 0.5, "train": 11.25, "publish": 1.0},
        wall_seconds=160.5,
        idle_seconds=8.0,
        staleness_bound=4,
        outstanding=31,
        at_ns=START_NS + 1_300_000_000,
    ),
    "generator_report": m.GeneratorReport(
        run="demo",
        generator="generator-1",
        generation=2,
        version=12,
        seconds={"busy": 150.0, "idle": 6.5, "load": 4.0},
        wall_seconds=160.5,
        idle_seconds=6.5,
        tokens=20_480,
        rollouts=640,
        outcomes={"ok": 410, "wrong": 228, "verifier_timeout": 2},
        inflight=32,
        at_ns=START_NS + 1_300_000_000,
    ),
    "heartbeat": m.Heartbeat(
        run="demo",
        service="generator",
        instance="generator-1",
        state="ready",
        detail="sampling 32 completions with version 12",
        started_ns=START_NS - 9_000_000_000,
        at_ns=START_NS,
    ),
    "dead_letter": m.DeadLetter(
        stream="ROLLOUTS",
        subject="tailrace.v1.demo.rollout.train",
        sequence=977,
        consumer="learner",
        code="malformed",
        reason="expected a map, got int",
        headers={"Nats-Msg-Id": "demo.2.41.5", "Tailrace-Schema": "rollout/1"},
        payload=b"\x00\xff",
        size=2,
        deliveries=1,
        at_ns=START_NS,
    ),
}
