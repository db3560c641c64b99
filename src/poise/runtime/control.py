"""Small agreements between workers, from the main thread only.

Only numbers and UTF-8 text travel; nothing is pickled.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.errors import Disagreement, InvalidSetting
from poise.runtime.collectives import Collectives
from poise.runtime.liveness import Liveness


class Control:
    """The calls that all workers make together outside of training steps."""

    def __init__(self, collectives: Collectives, liveness: Liveness) -> None:
        self._collectives = collectives
        self._liveness = liveness

    @property
    def worker(self) -> int:
        """This worker's number."""
        return self._collectives.worker

    def table(self, row: Sequence[float], doing: str) -> list[list[float]]:
        """Return every worker's row of numbers."""
        table = np.zeros((self._collectives.workers, len(row)))
        table[self.worker] = row
        with self._liveness.together(doing):
            self._collectives.sum(table).wait()
        rows: list[list[float]] = table.tolist()
        return rows

    def drawn(self, draw: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return the whole numbers that worker 0 draws."""
        doing = "the draw of the sampler"
        mine = draw() if self.worker == 0 else np.zeros(0, dtype=np.int64)
        length = int(self.table([len(mine)], doing)[0][0])
        numbers = mine if self.worker == 0 else np.empty(length, dtype=np.int64)
        with self._liveness.together(doing):
            self._collectives.broadcast(numbers, 0).wait()
        return numbers

    def texts(self, mine: str, doing: str) -> list[str]:
        """Return every worker's text."""
        text = mine.encode()
        lengths = self._lengths(text, doing)
        everybody = range(self._collectives.workers)
        return [self._text_of(each, text, lengths, doing).decode() for each in everybody]

    def mean(self, value: float, count: float) -> float:
        """Return the mean of all workers' values, each counting count times."""
        rows = self.table([value * count if count > 0 else 0.0, count], "mean")
        total = sum(counted for _, counted in rows)
        if total == 0:
            raise InvalidSetting("mean got count=0 from every worker; at least one must count")
        return sum(part for part, _ in rows) / total

    def agree(self, facts: Mapping[str, object], doing: str) -> None:
        """Raise Disagreement on every worker unless all of them hold the same facts."""
        text = json.dumps({key: str(value) for key, value in facts.items()}).encode()
        lengths = self._lengths(text, doing)
        reference = self._text_of(0, text, lengths, doing)
        flags = self.table([reference != text], doing)
        different = [worker for worker, (flag,) in enumerate(flags) if flag]
        if different:
            other = self._text_of(different[0], text, lengths, doing)
            raise Disagreement(_difference(reference, other, different))

    def _lengths(self, text: bytes, doing: str) -> list[int]:
        return [int(length) for (length,) in self.table([len(text)], doing)]

    def _text_of(self, worker: int, own: bytes, lengths: list[int], doing: str) -> bytes:
        mine = self.worker == worker
        text = np.frombuffer(bytearray(own if mine else lengths[worker]), dtype=np.uint8)
        with self._liveness.together(doing):
            self._collectives.broadcast(text, worker).wait()
        return text.tobytes()


def checked_mean(value: Any, count: float) -> tuple[float, float]:
    """Return what `mean` was called with as two numbers, or raise."""
    try:
        number = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidSetting(
            f"mean got {value!r}; it takes a number or a tensor of one element"
        ) from None
    if not count >= 0 or count == float("inf"):
        raise InvalidSetting(f"mean got count={count}; a count is a number from 0 up")
    return number, float(count)


def _difference(reference: bytes, other: bytes, different: list[int]) -> str:
    """Say where the first differing worker departs from worker 0."""
    expected, found = json.loads(reference), json.loads(other)
    keys = [*expected, *(key for key in found if key not in expected)]
    key = next(key for key in keys if expected.get(key) != found.get(key))
    who = f"worker {different[0]}"
    return (
        f"{key} is {found.get(key, 'missing')} on {who} and {expected.get(key, 'missing')} on "
        f"worker 0; workers {different} differ from worker 0; "
        "run the same script with the same settings and data everywhere"
    )
