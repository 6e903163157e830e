"""Which blobs make a policy version: a keyframe and the patches on top of it. Pure decisions of both sides."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from contracts.messages import PolicyRef, PolicyVersion
from contracts.policies import TensorSpec, WeightPatch

LARGEST_PATCH = 0.5  # of a full transfer; what is larger is not worth a longer chain


@dataclass(frozen=True)
class Route:
    """One way to a version's weights: begin with those of `start`, apply `patches` in order."""

    start: PolicyRef
    patches: list[WeightPatch]
    held: bool = False  # the weights of `start` are there already


def routes(version: PolicyVersion, held: PolicyRef | None) -> list[Route]:
    """Ways to a version's weights for someone who holds those of `held`, cheapest first.

    For a version made of patches, its whole weights under its own digest are the last resort: they are there once the
    publisher has repaired the chain.
    """
    chain = policies_of(version)
    found = [Route(held, version.patches[chain.index(held) :], held=True)] if held is not None and held in chain else []
    found.append(Route(chain[0], version.patches))
    if version.patches:
        found.append(Route(version.policy, []))
    return found


def policies_of(version: PolicyVersion) -> list[PolicyRef]:
    """The policies that one passes on the way to a version, from its keyframe to itself."""
    return [version.keyframe or version.policy, *(patch.policy for patch in version.patches)]


def blobs_of(version: PolicyVersion) -> frozenset[str]:
    """Digests of all blobs that readers of a version may need, its bundle included."""
    weights = {version.policy.digest, *(patch.digest for patch in version.patches)}
    return frozenset(weights | {version.bundle} | ({version.keyframe.digest} if version.keyframe else set()))


def is_stored(version: PolicyVersion, blobs: Set[str]) -> bool:
    """Whether `blobs` are enough to load a version: its bundle, and its weights whole or as a chain."""
    chain = {version.keyframe.digest, *(patch.digest for patch in version.patches)} if version.keyframe else None
    return version.bundle in blobs and (version.policy.digest in blobs or (chain is not None and chain <= blobs))


def may_extend(
    last: PolicyVersion, generation: int, version: int, tensors: list[TensorSpec], keyframe_every: int
) -> bool:
    """Whether a patch on top of `last` can be the next version, if it is small enough for `worth_a_patch`."""
    return (
        last.policy.generation == generation
        and last.policy.version < version
        and last.tensors == tensors
        and len(last.patches) + 1 < keyframe_every
    )


def worth_a_patch(last: PolicyVersion, patch_bytes: int) -> bool:
    """False where a keyframe is the better deal: for the one transfer, or for whoever joins later.

    The patches of a chain together stay below a full transfer, so a late joiner never fetches more than twice as much
    as from a keyframe.
    """
    chain = sum(patch.size for patch in last.patches) + patch_bytes
    return patch_bytes <= LARGEST_PATCH * last.size and chain < last.size


def extended(last: PolicyVersion, patch: WeightPatch) -> tuple[PolicyRef, list[WeightPatch]]:
    """Keyframe and patches of the version that `patch` makes of `last`."""
    return last.keyframe or last.policy, [*last.patches, patch]
