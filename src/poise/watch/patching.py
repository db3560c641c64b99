"""Put a call in the place of another while a script runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, call: Callable[..., Any]) -> Iterator[None]:
    """Put another call in the place of one, until the block is left."""
    original = getattr(owner, name)
    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
