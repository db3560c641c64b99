"""Where workers leave word for each other: what outlives a generation.

It says who is alive and holds a few short texts. Whoever hosts it may be lost with its process;
asking then raises `RendezvousLost`.
"""

from collections.abc import Sequence
from typing import Protocol


class RendezvousLost(Exception):
    """The process that hosts the rendezvous is gone."""


class Rendezvous(Protocol):
    """Texts by their keys. Safe to use from several threads."""

    def set(self, key: str, text: str) -> None:
        """Leave a text, in place of an earlier one."""

    def get(self, keys: Sequence[str]) -> list[str]:
        """Return texts as soon as all of them are there."""
