"""Real processes are killed, starved and fed poison; the run goes on, trains nothing twice and says what it lost."""

from __future__ import annotations

import asyncio
import signal

import msgpack
import msgspec
import numpy as np
import pytest

from contracts import codec, subjects
from contracts.messages import BlobManifest, DeadLetter, Discard, Purpose, Reason, Rollout, Sampling, Task
from infra.deadletters import PAYLOAD_BYTES
from infra.policies import PolicyStore
from tests.acceptance.cluster import Cluster


async def messages(c: Cluster, channel: subjects.Channel, **tokens: str) -> list:
    """All of a channel's messages in the run so far."""
    read = c.bus.read(channel, consumer="test", follow=False, **tokens)
    return [received.message async for received in read]


async def dead_letters(c: Cluster) -> list[DeadLetter]:
    letters = await messages(c, subjects.DLQ)
    return [letter for letter in letters if f".{c.run}." in letter.subject]


def assert_sound(summary: dict, *, steps: int) -> None:
    """What holds for every complete run, whatever happened to it."""
    assert summary["steps"] == steps
    assert summary["duplicates_trained"] == 0
    assert summary["staleness_max"] <= summary["staleness_bound"]
    assert [line for line in summary["mismatches"] if "step" in line] == []


async def test_a_generator_killed_in_mid_group_has_its_tasks_redone(cluster):
    async with cluster() as c:
        c.start("learner")
        c.start("generator-1", GENERATOR__MAX_REQUESTS=8)
        await c.until_logged("learner", "step", version=1)
        c.kill("generator-1")
        c.start("generator-2")
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=6)
        assert summary["rollouts_trained"] == 6 * 4 * 4, "every group is complete"
        assert summary["tasks_expired"] == 0, "the tasks came back, nobody had to give them up"


@pytest.mark.parametrize("moment", ["stepped", "checkpoint"])
async def test_a_learner_killed_at_the_worst_moment_resumes(cluster, moment):
    async with cluster(LEARNER__STEPS=8) as c:
        c.start("generator-1")
        c.start("learner")
        # right after an optimizer step, before its version is out; or while a checkpoint is being written
        if moment == "stepped":
            await c.until_logged("learner", "stepped", version=5)
        else:
            await c.until(
                lambda: list((c.directory / "run" / "learner").glob("*4*")), "checkpoint 4 begins", every=0.001
            )
        c.kill("learner")
        c.start("learner")
        assert await c.finish() == 0
        resumed = c.logged("learner", "resumed")
        assert resumed and resumed[0]["generation"] == 2
        assert resumed[0]["version"] >= 2, "from a complete checkpoint"
        summary = await c.summary()
        assert_sound(summary, steps=8)
        assert summary["rollouts_trained"] == 8 * 4 * 4
        policies = [m.policy for m in await messages(c, subjects.POLICY_PUBLISHED, run=c.run)]
        digests: dict[tuple[int, int], set[str]] = {}
        for policy in policies:
            digests.setdefault((policy.generation, policy.version), set()).add(policy.digest)
        assert all(len(content) == 1 for content in digests.values()), "one id, one content"
        tasks = {m.task_id for m in await messages(c, subjects.ROLLOUT, run=c.run, purpose=Purpose.TRAIN)}
        assert {f"train-{i}" for i in range(8 * 4)} <= tasks, "no prompt was skipped"


async def test_a_task_whose_policy_is_not_there_yet_is_held(cluster):
    """However long the learner is down: the policy comes with the one that takes over."""
    async with cluster(LEARNER__STEPS=8) as c:
        c.start("generator-1")
        c.start("learner")
        await c.until_logged("learner", "step", version=2)
        c.kill("learner")
        head = (await PolicyStore(c.bus, c.run).head()).policy
        task = Task(
            id="early", run=c.run, purpose=Purpose.EVAL, environment="reverse-text", seed=1, group_size=1,
            sampling=Sampling(max_tokens=4), generation=head.generation, min_version=head.version + 1,
        )  # fmt: skip
        await c.bus.publish(subjects.TASK, task, id="early", run=c.run, purpose=Purpose.EVAL, pool="default")
        await c.until_logged("generator-1", "waiting for the policy of a task", task="early")
        c.start("learner")
        assert await c.finish() == 0
        rollouts = await messages(c, subjects.ROLLOUT, run=c.run, purpose=Purpose.EVAL)
        (early,) = [rollout for rollout in rollouts if rollout.task_id == "early"]
        assert early.segments[0].policy.generation == head.generation + 1
        assert await dead_letters(c) == []


async def test_everybody_survives_the_death_of_the_server(cluster):
    async with cluster() as c:
        c.start("learner")
        c.start("generator-1")
        await c.until_logged("learner", "step", version=2)
        before = {m.id for m in await messages(c, subjects.ROLLOUT, run=c.run)}
        c.server.kill()
        await asyncio.sleep(3)
        assert all(process.poll() is None for process in c.processes.values())
        c.server.start()
        assert await c.finish() == 0
        assert_sound(await c.summary(), steps=6)
        after = {m.id for m in await messages(c, subjects.ROLLOUT, run=c.run)}
        assert before <= after, "what was acknowledged is still there"


async def test_generators_join_and_leave_at_any_time(cluster):
    async with cluster(LEARNER__STEPS=1000) as c:
        c.start("learner")
        await c.until_logged("learner", "ready")
        await asyncio.sleep(2)
        assert c.processes["learner"].poll() is None, "without a generator the learner waits"
        c.start("generator-1")
        await c.until_logged("learner", "step", version=2)
        c.start("generator-2")
        await c.until_logged("generator-2", "ready")
        c.kill("generator-1", signal.SIGTERM)
        assert await c.finish("generator-1", seconds=30) == 0
        trained = len(c.logged("learner", "step"))
        await c.until(lambda: len(c.logged("learner", "step")) > trained + 3, "the other one goes on")
        c.kill("learner", signal.SIGTERM)
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=summary["steps"])
        assert {m.generator for m in await messages(c, subjects.ROLLOUT, run=c.run)} == {"generator-1", "generator-2"}


async def test_sigterm_in_mid_generation_gives_tasks_back_in_bounded_time(cluster):
    """Long completions on a slow share of a core: the drain limit comes first, another generator does the work."""
    async with cluster(
        LEARNER__STEPS=2, LEARNER__SAMPLING__MAX_TOKENS=200, LEARNER__SAMPLING__STOP="[]", LEARNER__GROUP_SIZE=16
    ) as c:
        c.start("learner")
        c.start("generator-1", SERVICE__DRAIN_SECONDS=1)
        await c.until_logged("generator-1", "ready")
        await c.until(lambda: c.logged("learner", "ready"), "learner is ready")
        await asyncio.sleep(0.5)
        c.kill("generator-1", signal.SIGTERM)
        assert await c.finish("generator-1", seconds=20) == 0
        c.start("generator-2")
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=2)
        assert summary["tasks_expired"] == 0


async def test_a_group_whose_last_rollout_never_comes_does_not_hold_up_the_run(cluster):
    """A generator that publishes three of four rollouts and acknowledges the task: here, this test."""
    async with cluster(LEARNER__GROUP_DEADLINE=2, LEARNER__STEPS=1000, GENERATOR__MAX_REQUESTS=8) as c:
        c.start("learner")
        await c.until_logged("learner", "ready")
        c.start("generator-1")
        await c.until_logged("learner", "step", version=1)
        c.kill("generator-1", signal.SIGSTOP)
        await asyncio.sleep(1)
        template: Rollout = (await messages(c, subjects.ROLLOUT, run=c.run))[-1]
        task = await _take_task(c)
        for index in range(task.group_size - 1):
            await _publish_as(c, template, task, index)
        c.kill("generator-1", signal.SIGCONT)
        await asyncio.sleep(4)  # the deadline passes
        trained = len(c.logged("learner", "step"))
        await c.until(lambda: len(c.logged("learner", "step")) > trained + 3, "the run goes on")
        c.kill("learner", signal.SIGTERM)
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=summary["steps"])
        steps = await messages(c, subjects.STEP, run=c.run)
        used = [rollout for step in steps for rollout in step.rollout_ids if rollout.startswith(f"{task.id}.")]
        discards = await messages(c, subjects.DISCARD, run=c.run)
        stale = [r for d in discards if d.reason == Reason.STALE for r in d.rollout_ids if r.startswith(f"{task.id}.")]
        assert len(used) + len(stale) == task.group_size - 1, "trained without the lost one, or too old by then"


async def _take_task(c: Cluster) -> Task:
    """Pull one task and acknowledge it, as a generator would after the work."""
    name = subjects.TASK_WORKERS.name(run=c.run, purpose=Purpose.TRAIN, pool="default")
    jetstream = c.bus.connection.client.jetstream()
    subscription = await jetstream.pull_subscribe_bind(name, subjects.TASK.stream)
    for _ in range(20):
        try:
            (message,) = await subscription.fetch(1, timeout=2)
            break
        except TimeoutError:
            continue  # the killed generator's tasks come back after ack_wait
    await message.ack_sync()
    return codec.decode(message.data, Task)


async def _publish_as(c: Cluster, template: Rollout, task: Task, index: int) -> None:
    rollout = msgspec.structs.replace(
        template,
        id=f"{task.id}.{index}",
        task_id=task.id,
        index=index,
        reward=index / task.group_size,
        generator="lossy",
    )
    await c.bus.publish(subjects.ROLLOUT, rollout, id=f"{c.run}.{rollout.id}", run=c.run, purpose=Purpose.TRAIN)


async def test_poison_on_every_subject_becomes_dead_letters(cluster):
    async with cluster() as c:
        c.start("learner")
        c.start("generator-1")
        await c.until_logged("learner", "step", version=1)
        rollout = (await messages(c, subjects.ROLLOUT, run=c.run))[-1]
        nan = codec.unpack(codec.encode(rollout))
        broken = np.full(rollout.logprobs.shape, np.nan, np.float32)
        nan["logprobs"]["data"] = broken.tobytes()
        nan["id"], nan["task_id"], nan["index"] = "train-1.3", "train-1", 3
        poison = {
            "task": [b"", b"\xc1", msgpack.packb({"v": 2, "type": "task"}), msgpack.packb([1])],
            "rollout": [b"not msgpack", msgpack.packb(nan), msgpack.packb({"v": 1, "type": "rollout", "id": 7})],
            "policy.published": [b"\x00" * 100, msgpack.packb({"v": 9, "type": "policy_version"})],
        }
        where = {
            "task": subjects.TASK.subject(run=c.run, purpose=Purpose.TRAIN, pool="default"),
            "rollout": subjects.ROLLOUT.subject(run=c.run, purpose=Purpose.TRAIN),
            "policy.published": subjects.POLICY_PUBLISHED.subject(run=c.run),
        }
        for name, payloads in poison.items():
            for number, payload in enumerate(payloads):
                await c.bus.connection.send(
                    where[name], payload, id=f"{c.run}.{name}.{number}", headers={}, patience=10
                )
        unknown = Task(
            id="odd", run=c.run, purpose=Purpose.TRAIN, environment="no-such-environment", seed=1, group_size=2,
            sampling=rollout.sampling,
        )  # fmt: skip
        vast = msgspec.structs.replace(unknown, id="vast", environment="reverse-text", group_size=10**9)
        prying = msgspec.structs.replace(unknown, id="prying", environment="jsonl:/dev/zero")
        for task in (vast, unknown, prying):
            await c.bus.publish(
                subjects.TASK, task, id=f"{c.run}.{task.id}", run=c.run, purpose=Purpose.TRAIN, pool="default"
            )
        assert await c.finish() == 0
        assert_sound(await c.summary(), steps=6)
        letters = await dead_letters(c)
        for name, payloads in poison.items():
            buried = {letter.payload for letter in letters if letter.subject == where[name]}
            assert buried >= {payload[:PAYLOAD_BYTES] for payload in payloads}, name
        assert any("no-such-environment" in letter.reason for letter in letters)
        assert any("a group of 1000000000" in letter.reason for letter in letters)
        assert any("'jsonl:/dev/zero': a task may name a file only" in letter.reason for letter in letters)
        assert all(letter.reason for letter in letters)
        trained = {r for step in await messages(c, subjects.STEP, run=c.run) for r in step.rollout_ids}
        assert "odd.0" not in trained


async def test_a_full_task_queue_pushes_back_and_the_run_goes_on(cluster):
    async with cluster(LEARNER__STEPS=2) as c:
        filler = subjects.TASK.subject(run="somebody-else", purpose=Purpose.TRAIN, pool="default")
        stream = next(stream for stream in subjects.STREAMS if stream.name == subjects.TASK.stream)
        block = bytes(900 * 1024)
        for number in range(stream.max_bytes // len(block) + 1):
            try:
                await c.bus.connection.send(filler, block, id=f"fill-{number}", headers={}, patience=10)
            except Exception as error:
                assert type(error).__name__ == "QueueFull"
        for number in range(1024):  # the rest of the room, in small pieces
            try:
                await c.bus.connection.send(filler, bytes(1024), id=f"rest-{number}", headers={}, patience=10)
            except Exception as error:
                assert type(error).__name__ == "QueueFull"
                break
        c.start("learner")
        c.start("generator-1")
        await c.until_logged("learner", "task queue is full, waiting")
        await c.bus.connection.client.jetstream().purge_stream(subjects.TASK.stream, subject=filler)
        assert await c.finish() == 0
        assert_sound(await c.summary(), steps=2)


async def test_weights_that_do_not_match_their_digest_are_refused(cluster):
    """The newest policy's bytes are replaced in the store: a generator that joins now waits for the next version."""
    async with cluster(LEARNER__STEPS=400, LEARNER__KEYFRAME_EVERY=1) as c:
        c.start("generator-1")
        c.start("learner")
        await c.until_logged("learner", "step", version=2)
        c.kill("learner", signal.SIGSTOP)
        head = await PolicyStore(c.bus, c.run).head()
        subject = subjects.WEIGHTS.subject(run=c.run, digest=head.policy.digest)
        jetstream = c.bus.connection.client.jetstream()
        await jetstream.purge_stream(subjects.WEIGHTS.stream, subject=subject)
        chunk = {"Tailrace-Offset": "0"}
        await c.bus.connection.send(subject, bytes(head.size), id="forged-0", headers=chunk, patience=10)
        manifest = BlobManifest(digest=head.policy.digest, size=head.size, chunk_bytes=head.size, chunks=1)
        payload, headers = codec.encode(manifest), codec.headers_of(manifest)
        await c.bus.connection.send(subject, payload, id="forged-1", headers=headers, patience=10)
        c.start("generator-2")
        await c.until_logged("generator-2", "policy not loaded", version=head.policy.version)
        assert "has the content of" in c.logged("generator-2", "policy not loaded")[0]["error"]
        assert not c.logged("generator-2", "ready")
        c.kill("learner", signal.SIGCONT)
        await c.until_logged("generator-2", "ready")
        c.kill("learner", signal.SIGTERM)
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=summary["steps"])


async def test_a_second_learner_waits_and_an_old_one_is_fenced_off(cluster):
    """A learner frozen for longer than its lease wakes up to find that another has taken over, and ends."""
    async with cluster(LEARNER__STEPS=40) as c:
        c.start("generator-1")
        c.start("learner")
        await c.until_logged("learner", "step", version=2)
        c.kill("learner", signal.SIGSTOP)
        c.start("learner-b")
        await c.until_logged("learner-b", "ready", seconds=60)
        c.kill("learner", signal.SIGCONT)
        assert await c.finish("learner") == 1
        await c.until_logged("learner-b", "step", version=6)
        assert (await PolicyStore(c.bus, c.run).head()).policy.generation == 2
        summary = await c.summary()
        assert summary["duplicates_trained"] == 0


async def test_what_was_dropped_is_on_the_bus_with_its_reason(cluster):
    """Staleness bound 0 and a task of an unknown run: discards say what and why."""
    async with cluster(LEARNER__MAX_STALENESS=0, LEARNER__STEPS=3) as c:
        c.start("learner")
        c.start("generator-1")
        await c.until_logged("learner", "step", version=1)
        rollout = (await messages(c, subjects.ROLLOUT, run=c.run))[-1]
        stray = msgspec.structs.replace(rollout, id="stray.0", task_id="stray", index=0)
        await c.bus.publish(subjects.ROLLOUT, stray, id=f"{c.run}.stray", run=c.run, purpose=Purpose.TRAIN)
        assert await c.finish() == 0
        summary = await c.summary()
        assert_sound(summary, steps=3)
        assert summary["staleness_max"] == 0, "synchronous"
        discards: list[Discard] = await messages(c, subjects.DISCARD, run=c.run)
        assert (Reason.UNKNOWN_TASK, ["stray.0"]) in [(d.reason, d.rollout_ids) for d in discards]
