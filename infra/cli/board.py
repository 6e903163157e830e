"""What a run looks like right now, kept up to date record by record. Pure."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import islice
from statistics import fmean

from contracts import messages as m

NS = 1e9
RECENT_STEPS = 5
RATE_SECONDS = 20.0  # rates are means over this time
FORGET_SECONDS = 30.0  # a process without a heartbeat for longer is shown as silent, and later dropped
HISTORY = 512  # step rewards kept for the sparkline


@dataclass
class Queue:
    """A stream that somebody works off."""

    name: str
    waiting: int = 0  # messages nobody has taken yet
    taken: int = 0  # messages being worked on
    oldest_seconds: float | None = None  # age of the oldest message still there


@dataclass
class Generator:
    """One generator process, from its reports."""

    report: m.GeneratorReport
    samples: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))  # (unix s, tokens so far)

    @property
    def tokens_per_second(self) -> float:
        """Over the last `RATE_SECONDS`."""
        newest, tokens = self.samples[-1]
        oldest, before = next(((t, n) for t, n in self.samples if newest - t <= RATE_SECONDS), self.samples[-1])
        return (tokens - before) / (newest - oldest) if newest > oldest else 0.0

    @property
    def idle_ratio(self) -> float | None:
        """Of wall time since the first training task."""
        return self.report.idle_seconds / self.report.wall_seconds if self.report.wall_seconds else None


@dataclass
class Evaluation:
    """Held-out answers of one policy version so far."""

    answers: int = 0
    right: int = 0


class Board:
    """Fed with the records of one run; read by the views."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.policy: m.PolicyVersion | None = None
        self.step: m.StepReport | None = None
        self.rewards: deque[float] = deque(maxlen=HISTORY)  # mean per step, of the surviving steps
        self.step_times: deque[float] = deque(maxlen=RECENT_STEPS + 1)  # unix s
        self.generators: dict[str, Generator] = {}
        self.services: dict[str, m.Heartbeat] = {}
        self.discards: Counter[str] = Counter()
        self.dead_letters: Counter[str] = Counter()
        self.evaluations: dict[int, Evaluation] = {}  # by version
        self.evaluated: set[str] = set()
        self.queues: list[Queue] = []

    def add(self, message: m.Message) -> None:
        """Take one record; others of the run than those shown are ignored."""
        match message:
            case m.PolicyVersion():
                if self.policy is None or message.policy >= self.policy.policy:
                    self._take_policy(message)
            case m.StepReport():
                self.step = message
                if message.rewards:
                    self.rewards.append(fmean(message.rewards))
                self.step_times.append(message.at_ns / NS)
            case m.GeneratorReport():
                self._take_report(message)
            case m.Heartbeat():
                self.services[message.instance] = message
            case m.Discard():
                self.discards[message.reason] += max(len(message.rollout_ids), 1)
            case m.DeadLetter():
                self.dead_letters[message.code] += 1
            case m.Rollout() if message.purpose == m.Purpose.EVAL and message.id not in self.evaluated:
                self.evaluated.add(message.id)
                evaluation = self.evaluations.setdefault(message.oldest.version, Evaluation())
                evaluation.answers += 1
                evaluation.right += message.outcome == m.Outcome.OK

    def _take_policy(self, message: m.PolicyVersion) -> None:
        if self.policy is not None and message.policy.generation > self.policy.policy.generation:
            # a learner that restarted continues at an older version: what came after it is lost
            kept = max(0, len(self.rewards) - (self.policy.policy.version - message.policy.version))
            self.rewards = deque(islice(self.rewards, kept), maxlen=HISTORY)
            self.step_times.clear()
        self.policy = message

    def _take_report(self, report: m.GeneratorReport) -> None:
        generator = self.generators.get(report.generator)
        if generator is None or report.tokens < generator.report.tokens:  # new, or restarted
            generator = self.generators[report.generator] = Generator(report)
        generator.report = report
        generator.samples.append((report.at_ns / NS, report.tokens))

    def alive(self, now: float) -> dict[str, m.Heartbeat]:
        """Processes that have said something lately, or that have not said goodbye. `now` in unix seconds."""
        return {
            instance: beat
            for instance, beat in sorted(self.services.items())
            if beat.state != "stopped" and now - beat.at_ns / NS < 2 * FORGET_SECONDS
        }

    @property
    def version(self) -> int | None:
        """Newest policy version."""
        return self.policy.policy.version if self.policy else None

    @property
    def reward(self) -> float | None:
        """Mean training reward of the last few steps."""
        return fmean(list(self.rewards)[-RECENT_STEPS:]) if self.rewards else None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last few steps."""
        if len(self.step_times) < 2:
            return None
        return (self.step_times[-1] - self.step_times[0]) / (len(self.step_times) - 1)

    @property
    def learner_idle(self) -> float | None:
        """Of wall time since the first training task."""
        return self.step.idle_seconds / self.step.wall_seconds if self.step and self.step.wall_seconds else None

    @property
    def generator_idle(self) -> float | None:
        """The same over all generators."""
        reports = [generator.report for generator in self.generators.values()]
        wall = sum(report.wall_seconds for report in reports)
        return sum(report.idle_seconds for report in reports) / wall if wall else None

    def tokens_per_second(self, now: float) -> float:
        """Sampled tokens of the generators that reported lately. `now` in unix seconds."""
        fresh = [g for g in self.generators.values() if now - g.report.at_ns / NS < RATE_SECONDS]
        return sum(generator.tokens_per_second for generator in fresh)
