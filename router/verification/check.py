"""What is to be checked about an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Check:
    """A verifier and what it needs: a name from `router.verification.verifiers` and JSON-able arguments."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def judges(self) -> bool:
        """Whether it tells right answers from wrong ones; others see the form alone, which most wrong answers have."""
        return self.name in ("tests", "arithmetic")
