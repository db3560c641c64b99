"""Fixtures: the worker processes, and a look for what a test leaves behind."""

from collections.abc import Iterator

import pytest

from tests.cluster import Workers
from tests.leaks import belongings, leaks_since

_CLUSTER = Workers()


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Four long-lived worker processes."""
    yield _CLUSTER
    _CLUSTER.close()


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    """A test that leaks a process, thread, group or environment variable fails."""
    before = belongings()
    yield
    leaks = leaks_since(before, ignored_processes=_CLUSTER.process_ids())
    assert not leaks, leaks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the laws of the core first, and then what needs worker processes."""
    items.sort(key=lambda item: "workers" in getattr(item, "fixturenames", ()))
