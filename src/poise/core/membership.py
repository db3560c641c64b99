"""Which worker of before each worker is, or is like, after some came, left or started anew."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat


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
    alike = defaultdict[Hashable, list[int]](list)
    for place, worker in enumerate(before):
        alike[worker.kind].append(place)
    left = {
        kind: chain((place for place in places if place not in taken), repeat(places[0]))
        for kind, places in alike.items()
    }
    return tuple(
        next(left.get(worker.kind, repeat(None))) if place is None else place
        for place, worker in zip(known, now, strict=True)
    )
