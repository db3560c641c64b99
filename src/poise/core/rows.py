"""Arrays over workers: when the workers change, and with an entry that cannot be."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from poise.core.timing import Flags, Floats
from poise.errors import InvalidSetting

State = TypeVar("State")


def with_rows_of(
    state: State, fresh: Any, origin: Sequence[int | None], names: Sequence[str]
) -> State:
    """Return a frozen state whose named arrays have the rows of other workers.

    Args:
        state: one whose arrays run over the workers that were there.
        fresh: the same of a single worker of which nothing is known.
        origin: for each worker now the number it had, or None if it is new.
        names: the fields that run over workers.
    """
    known = len(getattr(state, names[0]))
    rows = [known if number is None else number for number in origin]
    arrays: dict[str, Any] = {
        name: np.asfortranarray(np.concatenate([getattr(state, name), getattr(fresh, name)])[rows])
        for name in names
    }
    return replace(state, **arrays)  # type: ignore[type-var]


def refuse(wrong: Flags, values: Floats, name: str, required: str) -> None:
    """Raise, naming the first worker whose entry is wrong, and what is required."""
    if wrong.any():
        worker = int(wrong.argmax())
        raise InvalidSetting(f"{name}[{worker}] is {values[worker]}; give {required}")
