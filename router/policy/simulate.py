"""What a cascade would do on a table of prompts of which it is known who gets them right. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Outcome:
    """Of a cascade over a table, as expectations over the verifier's errors."""

    accuracy: float  # share of prompts that end with a right answer
    strong_share: float  # share of prompts that call the strong model
    cost: float  # mean of a prompt, in the unit that it was given in


def acceptance(right: NDArray[np.bool_], precision: float, recall: float) -> NDArray[np.float64]:
    """[n] P(the verifier accepts the answer), for answers that are right or wrong.

    recall = P(accepted | right). precision = P(right | accepted) over the whole table; wrong answers are accepted at
    the one rate that makes it so: r · recall · (1 − precision) / (precision · (1 − r)), with r the share of right ones.
    Raises `ValueError` where no rate up to 1 does.
    """
    if not (0 < precision <= 1 and 0 <= recall <= 1):
        raise ValueError(f"precision must lie in (0, 1], recall in [0, 1], not {precision} and {recall}")
    share = float(np.mean(right)) if len(right) else 0.0
    wrongly = 0.0 if share == 1.0 else share * recall * (1 - precision) / (precision * (1 - share))
    if wrongly > 1.0:
        raise ValueError(f"a share of {share:.3f} right answers cannot give a precision as low as {precision}")
    return np.where(right, recall, wrongly)


def cascade(
    weak: NDArray[np.bool_],
    strong: NDArray[np.bool_],
    cost_weak: float | NDArray[np.float64],
    cost_strong: float | NDArray[np.float64],
    *,
    precision: float = 1.0,
    recall: float = 1.0,
    tried: NDArray[np.bool_] | None = None,
) -> Outcome:
    """Weak first, the verifier over its answer, the strong model where that refuses; the strong answer is given as is.

    `weak`, `strong`: [n] whether each is right; costs: of one call, per prompt or for all; `tried`: [n] prompts whose
    weak answer is asked for at all, all by default (the others go to the strong model at once). Precision and recall
    are those of `acceptance`, over the weak answers asked for.
    """
    asked = np.ones(len(weak), dtype=np.bool_) if tried is None else tried
    accepted = np.zeros(len(weak))
    accepted[asked] = acceptance(weak[asked], precision, recall)
    right = accepted * weak + (1 - accepted) * strong
    cost = asked * cost_weak + (1 - accepted) * cost_strong
    return Outcome(float(np.mean(right)), float(np.mean(1 - accepted)), float(np.mean(cost)))
