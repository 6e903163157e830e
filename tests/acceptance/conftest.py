"""One cluster per test, with a run name and a directory of its own."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.cluster import Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Callable[..., Cluster]:
    """Makes the cluster: `async with cluster(LEARNER__STEPS=4) as c`."""
    return lambda **settings: Cluster(tmp_path, f"t-{secrets.token_hex(3)}", **settings)
