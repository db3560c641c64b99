"""Where workers leave word for each other: what outlives a generation.

It says who is alive and holds a few short texts. Whoever hosts it may be lost with its process:
asking then raises `RendezvousLost`, or does not return until `cut` is called.
"""

from collections.abc import Sequence
from typing import Protocol


class RendezvousLost(Exception):
    """The process that hosts the rendezvous is gone."""


class Rendezvous(Protocol):
    """Texts by their keys. One thread at a time may ask; any may cut."""

    launcher: str | None
    """The launcher that hosts it, in words; None: worker 0 does, as far as is known."""

    def set(self, key: str, text: str) -> None:
        """Leave a text, in place of an earlier one."""

    def get(self, keys: Sequence[str]) -> dict[str, str]:
        """Return those texts that are there; never waits for others to come."""

    def first(self, key: str, text: str) -> str:
        """Leave a text unless there is one; return the one that is there now."""

    def cut(self) -> None:
        """End what waits for the host, and all later calls, with RendezvousLost."""
