"""The small model that several tests load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from infra import models


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of `tiny`, made in a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield models.resolve("tiny")
