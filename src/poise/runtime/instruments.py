"""What commands bring to the trainings of a script that they run.

The script is the user's own, and makes its Balancer itself. So a command cannot hand anything in;
it states an instrument around the script's run, and each Balancer made there asks for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from poise.runtime.events import Events


def _same(stated: Any) -> Any:
    return stated


def _nothing(_: Events) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Instrument:
    """What a command wants of a training: to hear of it, and perhaps to change what is stated."""

    listen: Callable[[Events], None] = _nothing
    """Subscribes to what happens."""
    settings: Callable[[Any], Any] = _same
    """Returns the settings to train with, for those that the script states."""


_stated: ContextVar[tuple[Instrument, ...] | None] = ContextVar("poise_instruments", default=None)
_everywhere: list[Instrument] = []
"""The same for threads that a script starts, which begin without a context."""


@contextmanager
def instrumented(instrument: Instrument) -> Iterator[None]:
    """Have every Balancer that is made inside the block ask for an instrument."""
    token = _stated.set((*instruments(), instrument))
    _everywhere.append(instrument)
    try:
        yield
    finally:
        _everywhere.remove(instrument)
        _stated.reset(token)


def instruments() -> tuple[Instrument, ...]:
    """Return the instruments that are stated here."""
    stated = _stated.get()
    return tuple(_everywhere) if stated is None else stated
