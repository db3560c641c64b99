"""A saved place in an asynchronous training, read from plain values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from poise.core.plain import whole_in
from poise.engine.pool import Ranges
from poise.errors import StateMismatch


@dataclass(frozen=True)
class Place:
    """Where a training goes on."""

    epoch: int
    position: int
    """Samples of the epoch that were handed out,"""
    returned: Ranges
    """and those of them that were not pushed."""
    updates: int
    samples: int
    step: int

    @staticmethod
    def of(state: Mapping[str, Any], length: int) -> "Place":
        """Read the place from a state, in epochs of so many samples; raise if it is damaged."""
        whole = {
            name: whole_in(state, name)
            for name in ("epoch", "position", "updates", "samples", "step")
        }
        try:
            returned = tuple((int(start), int(stop)) for start, stop in state["returned"])
        except (KeyError, TypeError, ValueError):
            raise StateMismatch(
                f"the state has returned={state.get('returned')!r}, which are no ranges of "
                "samples; it is damaged, load another one"
            ) from None
        inside = all(0 <= start < stop <= whole["position"] for start, stop in returned)
        if not inside or whole["position"] > length:
            raise StateMismatch(
                f"the state is at position {whole['position']} with {list(returned)} left out, in "
                f"epochs of {length} samples; load the state of this training"
            )
        return Place(returned=returned, **whole)
