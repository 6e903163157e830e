"""`tailrace export --published`: any version that is kept, however it is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from infra import models, weights
from infra.bus import Bus
from infra.errors import UserError
from infra.policies import PolicyStore
from infra.server import EmbeddedServer
from learner.cli import _from_bus


async def test_each_kept_version_can_be_exported(bus: Bus, server: EmbeddedServer, run: str, tmp_path: Path) -> None:
    folder = models.resolve("tiny", seed=1)
    model = models.load_model(folder, dtype=torch.bfloat16, device=torch.device("cpu"))
    store = PolicyStore(bus, run, keyframe_every=10)
    bundle = await store.put_bundle(models.bundle(folder))
    published = []
    for version in range(3):
        with torch.no_grad():
            model.get_input_embeddings().weight[version] += 1.0
        data, specs = weights.pack(model.state_dict())
        published.append(
            await store.publish(
                generation=1, version=version, data=data, tensors=specs, bundle=bundle, parent=None
            )
        )  # fmt: skip
    assert [len(version.patches) for version in published] == [0, 1, 2]
    for version in (None, 1, 0):
        target = tmp_path / str(version)
        assert await _from_bus(run, server.settings, version, target) == (2 if version is None else version)
        exported = models.load_model(target, dtype=torch.bfloat16, device=torch.device("cpu"))
        data, _ = weights.pack(exported.state_dict())
        assert data == await store.fetch(published[2 if version is None else version])
    await store.collect(keep=1)
    await store._blobs.delete(published[1].patches[-1].digest)
    with pytest.raises(UserError, match=r"version 1 .* cannot be read from the bus"):
        await _from_bus(run, server.settings, 1, tmp_path / "gone")
