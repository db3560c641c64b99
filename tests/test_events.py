"""The contract of events: order, threads, and what an exception of a subscriber does."""

import threading
import time
from typing import Any

import pytest

from poise.runtime.clocks import Waits, host_stamp
from poise.runtime.events import Applied, Disturbed, Event, Events
from poise.runtime.instruments import Instrument, instrumented, instruments


def disturbed(step: int = 3) -> Disturbed:
    return Disturbed(step, host_stamp())


def elsewhere(events: Events, event: Event) -> None:
    """Tell an event on a thread of a framework."""
    thread = threading.Thread(target=lambda: events.tell(event))
    thread.start()
    thread.join()


def test_subscribers_hear_their_kind_in_the_order_in_which_they_came() -> None:
    events = Events()
    heard: list[tuple[str, int]] = []
    events.on(Disturbed, lambda event: heard.append(("a", event.step)))
    events.on(Disturbed, lambda event: heard.append(("b", event.step)))
    assert events.heard(Disturbed)
    assert not events.heard(Applied)
    events.tell(disturbed(3))
    events.tell(Applied(4, host_stamp(), None))
    assert heard == [("a", 3), ("b", 3)]


def test_an_event_is_told_on_the_thread_on_which_it_happens() -> None:
    events, threads = Events(), []
    events.on(Disturbed, lambda _: threads.append(threading.get_ident()))
    events.tell(disturbed())
    elsewhere(events, disturbed())
    assert threads[0] == threading.get_ident() != threads[1]


class Enough(BaseException):
    """Leaves a script."""


def leave(_: Any) -> None:
    raise Enough


def test_an_exception_on_the_training_thread_reaches_the_script_at_once() -> None:
    events = Events()
    heard: list[Event] = []
    events.on(Disturbed, leave)
    events.on(Disturbed, heard.append)
    with pytest.raises(Enough):
        events.tell(disturbed())
    assert heard == []


def test_an_exception_elsewhere_is_kept_for_the_training_thread() -> None:
    """There it would disturb a reduction, or be lost."""
    events = Events()
    events.on(Applied, leave)
    elsewhere(events, Applied(1, host_stamp(), None))
    with pytest.raises(Enough):
        events.tell(disturbed())
    events.tell(disturbed())


def test_instruments_are_found_inside_the_block_only() -> None:
    one, other = Instrument(), Instrument()
    assert instruments() == ()
    with instrumented(one):
        with instrumented(other):
            assert instruments() == (one, other)
        assert instruments() == (one,)
    assert instruments() == ()


def test_a_stamp_says_how_long_the_worker_had_waited() -> None:
    waits = Waits()
    waits.seconds = 2.5
    before = time.perf_counter()
    mark, host_s, excused_s = host_stamp(waits)
    assert before <= host_s <= time.perf_counter()
    assert (mark, excused_s) == (None, 2.5)
