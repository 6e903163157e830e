"""Who starts the ranks, and how many."""

from __future__ import annotations

import pytest

from infra.errors import UserError
from learner.ranks import started_by_launcher


@pytest.mark.parametrize(
    "ranks, world, expected", [(1, None, False), (4, None, False), (1, "1", False), (2, "2", True), (8, "8", True)]
)
def test_a_launcher_is_known_by_its_variables(ranks: int, world: str | None, expected: bool) -> None:
    assert started_by_launcher(ranks, {"WORLD_SIZE": world}.get) is expected


@pytest.mark.parametrize("ranks, world", [(1, "2"), (2, "1"), (4, "2")])
def test_another_number_of_ranks_than_the_settings_say_is_refused(ranks: int, world: str) -> None:
    with pytest.raises(UserError, match=f"learner.ranks is {ranks}, but WORLD_SIZE says that {world} processes"):
        started_by_launcher(ranks, {"WORLD_SIZE": world}.get)
