"""What a run did, computed from the records on the bus. Pure.

The services' own figures are used where nothing else can know them (how long they computed), and are checked against
what the records say by themselves: the age of a rollout from its segments, its reward, the server's clock. Where the
two disagree the summary says so under `mismatches`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import msgspec

from contracts import messages as m
from infra.measures import age, covered, paired_interval, survives

ALIVE_GAP = 60  # seconds of silence of every service after which the run counts as not running
TOLERANCE = 0.1  # share of a time by which a service's word may differ from the records
SLACK = 5.0  # seconds, on top of it
NS = 1e9

# A verifier that failed says nothing about the answer: such an item is left out of the comparison.
ACCURACY: dict[str, float] = {
    m.Outcome.OK: 1.0,
    m.Outcome.WRONG: 0.0,
    m.Outcome.NO_ANSWER: 0.0,
    m.Outcome.TRUNCATED: 0.0,
}


@dataclass(frozen=True)
class RolloutFacts:
    """What is kept of a training rollout: not its tokens."""

    oldest: m.PolicyRef
    reward: float | None
    issued_ns: int  # learner's clock
    stored_ns: int  # server's clock


class Summary:
    """Takes the records of one run, each stream in its order, and gives the figures."""

    def __init__(self) -> None:
        self.policies: dict[m.PolicyRef, tuple[m.PolicyVersion, int]] = {}  # with the server's time, first copy
        self.steps: dict[m.PolicyRef, tuple[m.StepReport, int]] = {}
        self.rollouts: dict[str, RolloutFacts] = {}  # training rollouts, first copy: the one a learner takes
        self.tokens = 0  # sampled for training, redone tasks included: they cost as much
        self.sampling: dict[str, list[tuple[int, int]]] = defaultdict(list)  # generator -> (started, finished) in ns
        self.answers: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))  # digest -> item
        self.answered: set[str] = set()
        self.unusable_answers = 0  # not scored, or sampled by more than one policy
        self.discards: dict[str, str] = {}  # rollout -> last reason
        self.duplicates: set[str] = set()  # rollouts that came again and were dropped
        self.discarded_tasks: dict[str, set[str]] = defaultdict(set)  # reason -> tasks
        self.lives: dict[str, list[m.GeneratorReport]] = defaultdict(list)  # generator -> last report of each process
        self.dead_letters: Counter[str] = Counter()
        self.seconds: set[int] = set()  # in which something was recorded, server's clock

    def add(self, message: m.Message, stored_ns: int) -> None:
        """Take one record with the time at which the server stored it (unix ns)."""
        self.seconds.add(int(stored_ns // NS))
        match message:
            case m.Rollout():
                self._add_rollout(message, stored_ns)
            case m.PolicyVersion():
                # Without what each repeats of the ones before: there may be thousands.
                own = msgspec.structs.replace(message, tensors=[], patches=message.patches[-1:])
                self.policies.setdefault(message.policy, (own, stored_ns))
            case m.StepReport():
                self.steps.setdefault(message.policy, (message, stored_ns))
            case m.Discard():
                self._add_discard(message)
            case m.GeneratorReport(role="train"):
                lives = self.lives[message.generator]
                restarted = not lives or message.wall_seconds < lives[-1].wall_seconds
                lives[len(lives) - (not restarted) :] = [message]
            case m.DeadLetter():
                self.dead_letters[message.code] += 1

    def _add_rollout(self, rollout: m.Rollout, stored_ns: int) -> None:
        if rollout.purpose == m.Purpose.SERVE:
            return
        self.sampling[rollout.generator].append((rollout.started_ns, rollout.finished_ns))
        if rollout.purpose == m.Purpose.TRAIN:
            self.tokens += int(rollout.loss_mask.array().sum())
            facts = RolloutFacts(rollout.oldest, rollout.reward, rollout.issued_ns, stored_ns)
            self.rollouts.setdefault(rollout.id, facts)
        elif rollout.purpose == m.Purpose.EVAL and rollout.split == m.Split.HELDOUT and rollout.id not in self.answered:
            self.answered.add(rollout.id)
            digests = {segment.policy.digest for segment in rollout.segments}
            if len(digests) == 1 and rollout.outcome in ACCURACY:
                self.answers[digests.pop()][rollout.item].append(ACCURACY[m.Outcome(rollout.outcome)])
            else:
                self.unusable_answers += 1

    def _add_discard(self, discard: m.Discard) -> None:
        self.discarded_tasks[discard.reason].add(discard.task_id)
        if discard.reason == m.Reason.DUPLICATE:
            self.duplicates.update(discard.rollout_ids)
        else:
            self.discards.update(dict.fromkeys(discard.rollout_ids, discard.reason))

    def result(self) -> dict[str, Any]:
        """The figures; ratios in [0, 1], times in seconds, None where the records do not say."""
        starts: dict[int, int] = {}
        for ref in sorted(self.policies):
            starts.setdefault(ref.generation, ref.version)
        surviving = [step for ref, (step, _) in sorted(self.steps.items()) if survives(ref, starts)]
        trained = Counter(rollout for step in surviving for rollout in step.rollout_ids)
        ages, mismatches = self._check_steps(surviving, starts)
        learner_wall, learner_idle = self._learner_time(mismatches)
        generator_wall, generator_idle = self._generator_time(mismatches)
        reasons = Counter(
            reason
            for rollout, reason in self.discards.items()
            if reason == m.Reason.ZERO_ADVANTAGE or rollout not in trained
        )
        if self.duplicates:
            reasons[m.Reason.DUPLICATE] = len(self.duplicates)
        return {
            **self._evaluation(starts),
            "steps": len(surviving),
            "steps_lost": len(self.steps) - len(surviving),
            "learner_generations": len(starts),
            "staleness_bound": max((step.staleness_bound for step in surviving), default=None),
            "staleness_max": max(ages, default=None),
            "staleness_mean": fmean(ages) if ages else None,
            "learner_idle_ratio": learner_idle / learner_wall if learner_wall else None,
            "generator_idle_ratio": generator_idle / generator_wall if generator_wall else None,
            "training_seconds": learner_wall,
            "tokens_per_second": self.tokens / learner_wall if learner_wall else None,
            "rollouts_trained": len(trained),
            "rollouts_discarded": dict(sorted(reasons.items())),
            "tasks_expired": len(self.discarded_tasks[m.Reason.TASK_EXPIRED]),
            "duplicates_trained": trained.total() - len(trained),
            "policy_versions": len({ref.version for ref in self.policies if survives(ref, starts)}),
            **self._weights(),
            "wall_seconds": self._wall_seconds(),
            "reward_per_step": [fmean(step.rewards) if step.rewards else None for step in surviving],
            "dead_letters": dict(sorted(self.dead_letters.items())),
            "mismatches": mismatches,
        }

    def _weights(self) -> dict[str, int]:
        """What was stored of the policy versions, each blob once: equal weights have one digest."""
        stored: dict[str, m.PolicyVersion] = {}
        for version, _ in self.policies.values():
            stored[version.patches[-1].digest if version.patches else version.policy.digest] = version
        patches = sum(bool(version.patches) for version in stored.values())
        return {
            "weights_bytes": sum(version.transfer for version in stored.values()),
            "weights_keyframes": len(stored) - patches,
            "weights_patches": patches,
        }

    def _evaluation(self, starts: dict[int, int]) -> dict[str, Any]:
        """Accuracy of the first policy and of the last one on held-out items, and the paired interval of the gain."""
        ordered = [ref for ref in sorted(self.policies) if survives(ref, starts)]
        means = [
            {item: fmean(scores) for item, scores in self.answers.get(ref.digest, {}).items()}
            for ref in (ordered[:1] + ordered[-1:])
        ]
        before, after = means or ({}, {})
        interval = paired_interval(before, after)
        return {
            "eval_before": fmean(before.values()) if before else None,
            "eval_after": fmean(after.values()) if after else None,
            "eval_delta": interval[1] if interval else None,
            "eval_delta_ci": list(interval[2:]) if interval else None,
            "eval_interval": "95 %, paired over items, normal approximation",
            "eval_items": interval[0] if interval else 0,
            "eval_unusable": self.unusable_answers,
        }

    def _check_steps(self, steps: list[m.StepReport], starts: dict[int, int]) -> tuple[list[int], list[str]]:
        """Age of every trained rollout at its step, from its own segments, and where the step's report differs."""
        ages: list[int] = []
        wrong: list[str] = []
        for step in steps:
            missing = lost = aged = valued = 0
            for rollout, reported, reward in zip(step.rollout_ids, step.staleness, step.rewards, strict=False):
                facts = self.rollouts.get(rollout)
                if facts is None:
                    missing += 1
                    ages.append(reported)
                    continue
                actual = age(facts.oldest, step.policy.generation, step.step - 1, starts)
                ages.append(reported if actual is None else actual)
                lost += actual is None
                aged += actual is not None and actual != reported
                valued += facts.reward != reward
            for count, what in (
                (missing, "are not on the bus"),
                (lost, "were sampled by a policy that these weights do not descend from"),
                (aged, "have another staleness than the step reports"),
                (valued, "have another reward than the step reports"),
            ):
                if count:
                    wrong.append(f"step {step.step}: {count} of {len(step.rollout_ids)} trained rollouts {what}")
        return ages, wrong

    def _learner_time(self, mismatches: list[str]) -> tuple[float, float]:
        """Wall and idle seconds since the first training task, over all learner processes, lost steps included."""
        wall = idle = 0.0
        for generation in sorted({ref.generation for ref in self.steps}):
            steps = [entry for ref, entry in sorted(self.steps.items()) if ref.generation == generation]
            last, last_ns = steps[-1]
            wall += last.wall_seconds
            idle += last.idle_seconds
            begun = min((ns for ref, (_, ns) in self.policies.items() if ref.generation == generation), default=None)
            if begun is not None:
                self._check_wall(generation, last, begun, last_ns, mismatches)
            waited = self._waited(steps)
            if waited - last.idle_seconds > SLACK + TOLERANCE * last.wall_seconds:
                mismatches.append(
                    f"learner generation {generation} reports {last.idle_seconds:.1f} s of idle time, "
                    f"but its rollouts came so late that it waited for at least {waited:.1f} s"
                )
        return wall, idle

    def _check_wall(self, generation: int, last: m.StepReport, begun: int, end: int, mismatches: list[str]) -> None:
        """Training lasted from the first task, which came after the first policy, to the last report."""
        issued = min((f.issued_ns for f in self.rollouts.values() if f.issued_ns >= begun), default=end)
        shortest, longest = (end - issued) / NS, (end - begun) / NS
        if not _about(shortest, last.wall_seconds, longest):
            mismatches.append(
                f"learner generation {generation} reports {last.wall_seconds:.1f} s of training, "
                f"the server saw {shortest:.1f} to {longest:.1f} s"
            )

    def _waited(self, steps: list[tuple[m.StepReport, int]]) -> float:
        """Seconds between a step's report and the arrival of the last rollout of the next step: idle for certain."""
        waited = 0
        for (_, previous_ns), (step, _) in pairwise(steps):
            stored = [self.rollouts[rollout].stored_ns for rollout in step.rollout_ids if rollout in self.rollouts]
            waited += max(0, max(stored, default=previous_ns) - previous_ns)
        return waited / NS

    def _generator_time(self, mismatches: list[str]) -> tuple[float, float]:
        """Wall and idle seconds since the first training task, over all generator processes."""
        wall = idle = 0.0
        for generator, lives in sorted(self.lives.items()):
            wall += (own := sum(report.wall_seconds for report in lives))
            idle += (own_idle := sum(report.idle_seconds for report in lives))
            busy, sampled = own - own_idle, covered(self.sampling[generator]) / NS
            if busy - sampled > SLACK + TOLERANCE * own:
                mismatches.append(
                    f"{generator} reports {busy:.1f} busy seconds, its rollouts account for at most {sampled:.1f} s"
                )
        return wall, idle

    def _wall_seconds(self) -> float:
        """Seconds in which the run was running, the time between a stop and a resume left out."""
        seconds = sorted(self.seconds)
        return float(sum(min(b - a, ALIVE_GAP) for a, b in pairwise(seconds)))


def _about(low: float, value: float, high: float) -> bool:
    return low - SLACK - TOLERANCE * low <= value <= high + SLACK + TOLERANCE * high


def summarise(records: Iterable[tuple[m.Message, int]]) -> dict[str, Any]:
    """The figures of one run from its (record, unix ns at which the server stored it), each stream in its order."""
    summary = Summary()
    for message, stored_ns in records:
        summary.add(message, stored_ns)
    return summary.result()
