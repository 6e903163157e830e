"""The messages about policies: which weights there are, how they are stored, and which serve production."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from contracts.base import Digest, Message, Nat, PolicyRef, Positive, Token
from contracts.errors import InvalidMessage
from contracts.tensors import byte_count


class TensorSpec(msgspec.Struct, frozen=True):
    """Where one tensor lies in a policy's bytes."""

    name: str  # the model's state-dict key
    dtype: str  # see contracts.tensors.ITEM_SIZES
    shape: list[int]  # row-major; every dimension >= 0
    offset: Nat  # bytes from the start; tensors are laid out back to back, in order


class WeightPatch(msgspec.Struct, frozen=True):
    """What turns the weights of one policy into those of its successor; `infra/patches.py` describes the bytes."""

    policy: PolicyRef  # the weights that result
    digest: Digest  # sha256 of the patch's blob
    size: Positive  # bytes of the patch's blob


class PolicyVersion(Message, frozen=True, tag="policy_version"):
    """A policy that can be loaded now: learner -> generators, router, analyzer. Published after its weights.

    Its weights are one blob named by policy.digest, or patches on top of an earlier policy that is one, the keyframe.
    Whoever holds the keyframe or any policy on the way needs only the patches behind it.
    """

    run: Token  # run id
    policy: PolicyRef  # the weights this message announces
    tensors: list[TensorSpec]  # the layout of the weight blob named by policy.digest
    size: Nat  # bytes of the weight blob
    bundle: Digest  # of the blob with config and tokenizer: generators need nothing but the bus
    parent: PolicyRef | None  # the policy it was trained from; None for a generation's first
    published_ns: Nat  # unix ns
    keyframe: PolicyRef | None = None  # the policy that `patches` build on; None = this one is stored whole
    patches: list[WeightPatch] = []  # in order, from the keyframe to this policy, together no larger; empty = whole

    def check(self) -> None:
        self._check_patches()
        end = 0
        for spec in self.tensors:
            where = f"policy {self.policy.version}: {spec.name}"
            if spec.offset != end:
                raise InvalidMessage(f"{where}: starts at byte {spec.offset}, the tensor before it ends at {end}")
            end += byte_count(spec.dtype, spec.shape, where)
        if end != self.size:
            raise InvalidMessage(f"policy {self.policy.version}: its tensors end at byte {end} of {self.size}")

    def _check_patches(self) -> None:
        where = f"policy {self.policy.version}"
        if (self.keyframe is None) != (not self.patches):
            raise InvalidMessage(f"{where}: keyframe and patches go together")
        if self.keyframe is None:
            return
        chain = [self.keyframe, *(patch.policy for patch in self.patches)]
        if any(ref.generation != self.policy.generation for ref in chain) or chain[-1] != self.policy:
            raise InvalidMessage(f"{where}: its patches lead to another policy")
        if any(later.version <= earlier.version for earlier, later in pairwise(chain)):
            raise InvalidMessage(f"{where}: its patches are out of order")
        if (patched := sum(patch.size for patch in self.patches)) > self.size:
            raise InvalidMessage(f"{where}: {patched} bytes of patches are more than its {self.size} bytes of weights")

    @property
    def transfer(self) -> int:
        """Bytes that someone who holds its predecessor fetches: the last patch, or all of the weights."""
        return self.patches[-1].size if self.patches else self.size


class Promotion(Message, frozen=True, tag="promotion"):
    """From now on production is served by this policy: analyzer, operators -> generators, router."""

    run: Token  # run id
    version: PolicyVersion  # the policy, with all that is needed to load it
    previous: PolicyRef | None  # that served until now; None = none
    decided_by: str  # service instance, or the person's name
    reason: str  # one sentence for people
    override: bool  # True = a person decided, whatever the reports say
    at_ns: Nat  # unix ns

    def check(self) -> None:
        self.version.check()
        if self.version.run != self.run:
            raise InvalidMessage(f"promotion in run {self.run}: its policy is one of run {self.version.run}")

    @property
    def policy(self) -> PolicyRef:
        """The weights that serve from now on."""
        return self.version.policy
