"""Workers are known again: by their names, then by their kinds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from poise.core.membership import Identity, origins
from poise.core.observation import Change

kinds = st.sampled_from(["a100", "v100", "cpu"])
names = st.none() | st.integers(0, 7)


def distinct(workers: list[Identity]) -> list[Identity]:
    """Return the workers without those whose name another one has."""
    seen: set[object] = set()
    kept = []
    for worker in workers:
        if worker.name is None or worker.name not in seen:
            kept.append(worker)
        seen.add(worker.name)
    return kept


clusters = st.lists(st.builds(Identity, kinds, names), max_size=8).map(distinct)


@settings(max_examples=100, deadline=None)
@given(clusters, clusters)
def test_the_same_name_comes_first(before: list[Identity], now: list[Identity]) -> None:
    for worker, origin in zip(now, origins(before, now), strict=True):
        named = [place for place, each in enumerate(before) if each.name == worker.name]
        if worker.name is not None and named:
            assert origin == named[0]
        elif origin is not None:
            assert before[origin].kind == worker.kind


@settings(max_examples=100, deadline=None)
@given(clusters, clusters)
def test_a_worker_is_unknown_only_if_there_was_none_of_its_kind(
    before: list[Identity], now: list[Identity]
) -> None:
    there = {worker.kind for worker in before}
    names = {worker.name for worker in before if worker.name is not None}
    for worker, origin in zip(now, origins(before, now), strict=True):
        assert (origin is None) == (worker.kind not in there and worker.name not in names)


@settings(max_examples=100, deadline=None)
@given(clusters, clusters)
def test_each_worker_is_taken_once_while_others_of_its_kind_are_left(
    before: list[Identity], now: list[Identity]
) -> None:
    found = origins(before, now)
    for place, worker in enumerate(before):
        if found.count(place) > 1:
            assert all(
                each in found for each, other in enumerate(before) if other.kind == worker.kind
            )


@settings(max_examples=100, deadline=None)
@given(clusters)
def test_workers_that_stay_are_themselves(workers: list[Identity]) -> None:
    assert origins(workers, workers) == tuple(range(len(workers)))


@settings(max_examples=100, deadline=None)
@given(clusters.filter(bool), clusters.filter(bool))
def test_origins_are_those_of_a_change(before: list[Identity], now: list[Identity]) -> None:
    Change(origins(before, now), 8).check(len(before))


def test_workers_of_one_kind_are_taken_in_order_and_then_the_first_again() -> None:
    two = [Identity("a"), Identity("b"), Identity("a")]
    assert origins(two, [Identity("a")] * 4) == (0, 2, 0, 0)


def test_who_replaces_a_worker_has_its_speed_and_not_that_of_one_who_stays() -> None:
    before = [Identity("a", "one"), Identity("a", "two")]
    assert origins(before, [Identity("a", "one"), Identity("a", "three")]) == (0, 1)
    assert origins(before, [*before, Identity("a", "three")]) == (0, 1, 0)
