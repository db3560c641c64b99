"""Put calls in the places of others while a script runs."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple

Call = Callable[..., Any]
Wrap = Callable[[Call], Call]


class Patch(NamedTuple):
    """One call to replace."""

    owner: Any
    name: str
    wrap: Wrap
    """Makes the new call out of the old one."""


@contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Put calls in the places of others, until the block is left."""
    with ExitStack() as restoring:
        for owner, name, wrap in patches:
            original = getattr(owner, name)
            restoring.callback(setattr, owner, name, original)
            setattr(owner, name, wrap(original))
        yield


def preceded(action: Call) -> Wrap:
    """Have something done before each call, with the same arguments."""

    def wrap(original: Call) -> Call:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            action(*args, **kwargs)
            return original(*args, **kwargs)

        return call

    return wrap


def followed(action: Call) -> Wrap:
    """Have something done after each call, with the same arguments."""

    def wrap(original: Call) -> Call:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            action(*args, **kwargs)
            return result

        return call

    return wrap
