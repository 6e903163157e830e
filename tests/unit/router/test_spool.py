"""The queue on disk: order, bound, what a killed process leaves, and one owner."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from infra.errors import UserError
from router.spool import HEAD, Spool

LIMIT = 10_000


def records(first: int, last: int) -> list[bytes]:
    return [b"record %d" % number for number in range(first, last)]


def taken(spool: Spool, count: int = 1000) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count and (some := spool.peek(min(7, count - len(found)))):
        found += some
        spool.advance()
    return found


@pytest.mark.parametrize("segment", [1, 50, 200, LIMIT])
def test_records_come_out_in_order_once_over_restarts_and_segments(tmp_path: Path, segment: int) -> None:
    spool = Spool(tmp_path, LIMIT, segment_bytes=segment)
    assert spool.append(records(0, 20)) == 20
    assert taken(spool, 5) == records(0, 5)
    assert spool.append(records(20, 30)) == 10
    assert spool.peek(3) == records(5, 8)  # not taken
    spool.close()
    again = Spool(tmp_path, LIMIT, segment_bytes=segment)
    assert again.size == sum(HEAD.size + len(record) for record in records(5, 30))
    assert again.append(records(30, 40)) == 10
    assert taken(again) == records(5, 40)
    assert again.size == 0 and again.peek(1) == []
    assert len(list(tmp_path.glob("*.log"))) == 1  # what was taken is deleted
    again.close()


def test_what_exceeds_the_bound_is_refused_and_the_oldest_stay(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 5 * (HEAD.size + 8))
    assert spool.append(records(0, 9)) == 5
    assert spool.append(records(9, 10)) == 0
    assert taken(spool, 2) == records(0, 2)
    assert spool.append(records(5, 9)) == 2
    assert taken(spool) == [*records(2, 5), *records(5, 7)]
    spool.close()


TORN = {
    "half a body": lambda data: data[:-3],
    "half a head": lambda data: data + b"\0\0",
    "other bytes": lambda data: data[:-1] + b"?",
    "a length without end": lambda data: data + b"\xff" * 8,
    "zeros, as after a loss of power": lambda data: data + bytes(64),
}


@pytest.mark.parametrize("name", TORN)
def test_half_a_record_at_the_end_is_cut_off(tmp_path: Path, name: str) -> None:
    spool = Spool(tmp_path, LIMIT)
    spool.append(records(0, 3))
    spool.close()
    (file,) = tmp_path.glob("*.log")
    file.write_bytes(TORN[name](file.read_bytes()))
    again = Spool(tmp_path, LIMIT)
    whole = 2 if name in ("half a body", "other bytes") else 3
    again.append(records(3, 5))
    assert taken(again) == [*records(0, whole), *records(3, 5)]
    again.close()


POSITIONS = ["", "nonsense", "99 0", "1 99999", "0 3"]


@pytest.mark.parametrize("position", POSITIONS)
def test_a_position_that_makes_no_sense_repeats_rather_than_loses(tmp_path: Path, position: str) -> None:
    spool = Spool(tmp_path, LIMIT)
    spool.append(records(0, 3))
    spool.close()
    (tmp_path / "position").write_text(position)
    again = Spool(tmp_path, LIMIT)
    assert taken(again) == records(0, 3)
    again.close()


def test_killed_between_the_position_and_the_deletion_of_what_was_taken(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT, segment_bytes=1)
    for number in range(4):
        spool.append(records(number, number + 1))
    spool.close()
    (tmp_path / "position").write_text("3 0")
    again = Spool(tmp_path, LIMIT, segment_bytes=1)
    assert taken(again) == records(2, 4)
    again.close()


def test_a_broken_segment_in_the_middle_costs_what_is_in_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT, segment_bytes=1)
    for number in range(3):
        spool.append(records(number, number + 1))
    spool.close()
    (tmp_path / "00000002.log").write_bytes(b"\0" * 5)
    again = Spool(tmp_path, LIMIT)
    assert taken(again) == [*records(0, 1), *records(2, 3)]
    assert again.size == 0
    again.close()


def test_two_routers_do_not_share_a_folder(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    with pytest.raises(UserError, match="another router"):
        Spool(tmp_path, LIMIT)
    spool.close()
    Spool(tmp_path, LIMIT).close()


def test_a_segment_that_cannot_be_opened_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that can open no more files keeps what it has, and goes on when it can."""
    spool = Spool(tmp_path, LIMIT, segment_bytes=1)
    spool.append(records(0, 1))

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="too many"):
            patch.setattr(Path, "open", refuse)
            spool.append(records(1, 2))
    assert spool.append(records(1, 2)) == 1
    assert taken(spool) == records(0, 2)
    spool.close()


def test_a_disk_that_fails_when_it_is_closed_leaves_the_folder_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path, LIMIT)
    spool.append(records(0, 1))

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="broken"):
        patch.setattr(os, "fsync", refuse)
        spool.close()
    again = Spool(tmp_path, LIMIT)
    assert taken(again) == records(0, 1)
    again.close()
