"""Which worker of before each worker is, or is like, after some came, left or started anew."""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """Who a worker is, as far as anybody knows, and what it runs on."""

    kind: Hashable
    """What tells fast devices from slow ones: workers of one kind are taken to be equally fast."""
    name: Hashable | None = None
    """What no other worker has; None where nothing tells workers of one kind apart."""


def origins(before: Sequence[Identity], now: Sequence[Identity]) -> tuple[int | None, ...]:
    """Return for each worker the one before whose speed it has, as `Change.origin` wants it.

    That is the one with its name, whatever it runs on now. Workers without one take those of their
    kind that are left over, each once and in order; once all are taken, the first of their kind.
    None: there was none. Unnamed workers of one kind may trade places; that costs less than
    forgetting all of them, since devices of one kind are about equally fast.

    >>> old, new = Identity("old"), Identity("new")
    >>> origins([new, old, old], [old, new, old, new, Identity("rare")])
    (1, 0, 2, 0, None)
    >>> origins([Identity("old", "a"), Identity("old", "b")], [old, Identity("new", "a")])
    (1, 0)
    """
    named = {worker.name: place for place, worker in enumerate(before) if worker.name is not None}
    known = [named.pop(worker.name, None) for worker in now]
    taken = set(known)
    first: dict[Hashable, int] = {}
    free: dict[Hashable, deque[int]] = {}
    for place, worker in enumerate(before):
        first.setdefault(worker.kind, place)
        if place not in taken:
            free.setdefault(worker.kind, deque()).append(place)
    return tuple(
        place if place is not None else _of_kind(worker.kind, free, first)
        for place, worker in zip(known, now, strict=True)
    )


def _of_kind(
    kind: Hashable, free: dict[Hashable, deque[int]], first: dict[Hashable, int]
) -> int | None:
    left = free.get(kind)
    return left.popleft() if left else first.get(kind)
