"""The board as a picture for terminals and as a line for logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from infra.cli.board import FORGET_SECONDS, NS, Board

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 48  # steps shown in the sparkline


def line(board: Board, now: float) -> str:
    """One line of progress."""
    if board.step is None:
        return _preparing(board, now)
    step = board.step
    parts = [
        f"step {step.step}",
        f"reward {_number(board.reward)}",
        f"staleness {_staleness(step.staleness)} of {step.staleness_bound}",
        f"idle learner {_percent(board.learner_idle)} generators {_percent(board.generator_idle)}",
        f"{board.tokens_per_second(now):.0f} tokens/s",
    ]
    if board.seconds_per_step is not None:
        parts.append(f"{board.seconds_per_step:.1f} s/step")
    if board.version in board.evaluations:
        parts.append(f"held-out accuracy: {_evaluation(board)}")
    return " · ".join(parts)


def picture(board: Board, now: float, notes: Sequence[str] = ()) -> RenderableType:
    """The whole board: learning, generators, queues, processes, and the last notes of whoever shows it."""
    head = Table.grid(padding=(0, 2))
    head.add_column(style="bold")
    for name, value in _head(board, now):
        head.add_row(name, value)
    parts: list[RenderableType] = [head]
    if board.generators:
        parts.append(_generators(board, now))
    if board.queues:
        parts.append(_queues(board))
    parts.append(_processes(board, now))
    parts.extend(Text(note, style="yellow") for note in notes)
    return Panel(Group(*parts), title=f"tailrace · run {board.run}", title_align="left")


def _head(board: Board, now: float) -> list[tuple[str, RenderableType]]:
    rows: list[tuple[str, RenderableType]] = []
    if board.policy is not None:
        ref = board.policy.policy
        age = now - board.policy.published_ns / NS
        rows.append(("policy", f"version {ref.version}, generation {ref.generation}, {age:.0f} s old"))
    if board.step is None:
        rows.append(("now", _preparing(board, now)))
    else:
        step = board.step
        pace = f", {board.seconds_per_step:.1f} s per step" if board.seconds_per_step is not None else ""
        rows += [
            ("step", f"{step.step}{pace}, {step.outstanding} tasks under way"),
            ("reward", f"{_number(board.reward)}  {sparkline(list(board.rewards))}"),
            ("staleness", f"{_staleness(step.staleness)} versions, bound {step.staleness_bound}"),
        ]
        if evaluation := _evaluation(board):
            rows.append(("held out", evaluation))
    rows += [
        ("idle", f"learner {_percent(board.learner_idle)}, generators {_percent(board.generator_idle)}"),
        ("rate", f"{board.tokens_per_second(now):.0f} tokens/s"),
    ]
    if board.discards:
        rows.append(("discarded", _counts(board.discards)))
    if board.dead_letters:
        rows.append(("dead letters", Text(_counts(board.dead_letters), style="red")))
    return rows


def _generators(board: Board, now: float) -> Table:
    table = Table(
        "generator", "version", "idle", "tokens/s", "in flight", "rollouts", "report", box=None, pad_edge=False
    )
    for name, generator in sorted(board.generators.items()):
        report = generator.report
        age = now - report.at_ns / NS
        if age > 2 * FORGET_SECONDS:
            continue
        table.add_row(
            name,
            str(report.version),
            _percent(generator.idle_ratio),
            f"{generator.tokens_per_second:.0f}",
            str(report.inflight),
            str(report.rollouts),
            f"{age:.0f} s ago",
        )
    return table


def _queues(board: Board) -> Table:
    table = Table("queue", "waiting", "taken", "oldest", box=None, pad_edge=False)
    for queue in board.queues:
        oldest = "" if queue.oldest_seconds is None else f"{queue.oldest_seconds:.0f} s"
        table.add_row(queue.name, str(queue.waiting), str(queue.taken), oldest)
    return table


def _processes(board: Board, now: float) -> RenderableType:
    table = Table("process", "state", "heartbeat", "detail", box=None, pad_edge=False)
    for instance, beat in board.alive(now).items():
        age = now - beat.at_ns / NS
        state = Text("silent", style="red") if age > FORGET_SECONDS else Text(beat.state)
        table.add_row(instance, state, f"{max(age, 0):.0f} s ago", beat.detail)
    return table if table.row_count else Text("no process has reported yet", style="dim")


def _preparing(board: Board, now: float) -> str:
    if evaluation := _evaluation(board):
        return f"held-out accuracy: {evaluation}"
    beats = board.alive(now).values()
    return ", ".join(f"{beat.instance}: {beat.detail or beat.state}" for beat in beats) or "starting the processes"


def _evaluation(board: Board) -> str:
    return ", ".join(
        f"version {version} {evaluation.right / evaluation.answers:.3f} (of {evaluation.answers})"
        for version, evaluation in sorted(board.evaluations.items())
    )


def sparkline(values: Sequence[float]) -> str:
    """The last values as bars between their least and their greatest."""
    shown = values[-WIDTH:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in shown)


def final_table(summary: Mapping[str, Any]) -> Table:
    """The figures of a finished run that people ask for first."""
    table = Table(show_header=False, box=None, pad_edge=False, padding=(0, 2))
    table.add_column(style="bold")
    before, after, interval = summary["eval_before"], summary["eval_after"], summary["eval_delta_ci"]
    if interval is not None:
        low, high = (100 * bound for bound in interval)
        gain = f"{100 * summary['eval_delta']:+.1f} points, 95 % interval {low:+.1f} to {high:+.1f}"
        table.add_row("held-out accuracy", f"{before:.3f} → {after:.3f}  ({gain}; {summary['eval_items']} items)")
    rewards = [reward for reward in summary["reward_per_step"] if reward is not None]
    table.add_row(
        "training reward", f"{_number(rewards[0])} → {_number(rewards[-1])}  {sparkline(rewards)}" if rewards else "–"
    )
    table.add_row("steps", f"{summary['steps']} in {summary['wall_seconds']:.0f} s")
    table.add_row(
        "staleness",
        f"mean {_number(summary['staleness_mean'])}, max {summary['staleness_max']}, "
        f"bound {summary['staleness_bound']}",
    )
    table.add_row(
        "idle",
        f"learner {_percent(summary['learner_idle_ratio'])}, generators {_percent(summary['generator_idle_ratio'])}",
    )
    table.add_row("throughput", f"{_number(summary['tokens_per_second'], 1)} sampled tokens/s")
    table.add_row("rollouts trained", f"{summary['rollouts_trained']}, twice: {summary['duplicates_trained']}")
    table.add_row("rollouts discarded", _counts(summary["rollouts_discarded"]) or "none")
    table.add_row(
        "policy versions",
        f"{summary['policy_versions']}, {summary['weights_bytes'] / 1e6:.0f} MB of weights: "
        f"{summary['weights_keyframes']} whole, {summary['weights_patches']} as patches",
    )
    table.add_row("dead letters", _counts(summary["dead_letters"]) or "none")
    for mismatch in summary["mismatches"]:
        table.add_row(Text("mismatch", style="red"), mismatch)
    return table


def _staleness(values: Sequence[int]) -> str:
    return f"mean {sum(values) / len(values):.1f}, max {max(values)}" if values else "–"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"
