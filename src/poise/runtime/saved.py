"""The place in a training, and what was learned of speeds, as plain values for a checkpoint."""

from collections.abc import Mapping
from typing import Any, Protocol

from poise.core.plain import whole_in
from poise.core.plan import Plan
from poise.engine.progress import Progress
from poise.errors import OutOfOrder, StateMismatch
from poise.numbers import is_number
from poise.runtime.learned import Known
from poise.runtime.orders import Orders
from poise.runtime.session import Session
from poise.runtime.training import Saved

_VERSION = 3
_MOST_SAMPLES = 1e18
_PLACE = ("epoch", "position", "step", "samples", "skipped")


class Stream(Protocol):
    """A loader of a stream that may say where it stands."""

    @property
    def states(self) -> dict[int, Any]:
        """Where each loader process stands after the last batch handed out."""

    @property
    def states_before(self) -> dict[int, Any]:
        """The same, before that batch."""

    def resume(self, states: dict[int, Any]) -> None:
        """Let the next pass go on there."""


def saved_state(session: Session, orders: Orders | None, stream: Stream | None) -> Saved:
    """Return where training stands, and on worker 0 what was learned.

    Samples whose gradient is reduced count as used.
    """
    session.settle()
    progress = session.progress
    if progress.unapplied:
        raise OutOfOrder(
            f"state_dict was called between backward and optimizer.step() of step "
            f"{progress.step - 1}, when the samples are consumed but not learned from; "
            "call it after optimizer.step()"
        )
    place: Saved = {name: getattr(progress, name) for name in (*_PLACE, "effective_samples")}
    if orders is not None:
        place["drawn"] = orders.drawn(progress.epoch) if progress.position else ""
    if stream is not None:
        place["stream"] = stream.states_before if progress.unreduced else stream.states
    return {**_identity(session, orders), **place, **_learned(session)}


def load_state(
    state: Mapping[str, Any], session: Session, orders: Orders | None, stream: Stream | None
) -> None:
    """Go on at a saved place, or raise if it is another training's."""
    known = None
    if session.settings.policy.online:
        known = Known.of(state, session.engine, _kinds(session))
    session.progress = _loaded_progress(state, session, orders, stream)
    step, timetable = session.progress.step, session.first_plans
    if known is not None and known.split is not None:
        plan = Plan(known.split, step, known.gain, why="as before the resume")
        timetable = timetable.announce(plan)
    elif known is not None and known.global_batch != session.settings.global_batch:
        scaled = timetable.at(step).scaled(known.global_batch)
        why = "the global batch as before the resume"
        timetable = timetable.announce(Plan(scaled.split, step, known.gain, why=why))
    session.exchange.resume(step, timetable, known)
    session.plan = timetable.at(step)


def _learned(session: Session) -> Saved:
    if not session.settings.policy.online:
        return {}
    first = session.generation.worker == 0
    return {
        "policy": type(session.settings.policy).__name__,
        "split": list(session.plan.split),
        "gain": session.plan.gain,
        "kinds": _kinds(session),
        "engine": session.exchange.engine.state_dict() if first else None,
    }


def _kinds(session: Session) -> list[str]:
    return [member.kind for member in session.generation.members]


def _loaded_progress(
    state: Mapping[str, Any], session: Session, orders: Orders | None, stream: Stream | None
) -> Progress:
    for key, value in _identity(session, orders).items():
        if state.get(key) != value:
            raise StateMismatch(
                f"the state has {key}={state.get(key)!r} and this training {key}={value!r}; "
                "resume with the data set, shuffling and seed it was saved with"
                + ("" if orders is not None else ", each worker from the state it saved itself")
            )
    place = {name: whole_in(state, name) for name in _PLACE}
    if stream is not None:
        _load_stream(state, stream, place["position"])
    if orders is not None:
        orders.expect(place["epoch"], place["position"], state.get("drawn", ""))
    effective = _effective(state.get("effective_samples", place["samples"]))
    return Progress(**place, effective_samples=effective)  # type: ignore[arg-type]


def _load_stream(state: Mapping[str, Any], stream: Stream, position: int) -> None:
    places = state.get("stream") or {}
    if not isinstance(places, dict):
        raise StateMismatch(
            f"the state has stream={places!r}, which says nothing of loader processes; it is "
            "damaged, load another one"
        )
    if position and not places:
        raise StateMismatch(
            "the state is from the middle of a stream that cannot say where it stands; give "
            "the data set state_dict and load_state_dict, or save at the end of an epoch"
        )
    if position:
        stream.resume(places)


def _identity(session: Session, orders: Orders | None) -> Saved:
    """What must be the same for a state to belong to a training."""
    same: Saved = {"version": _VERSION, "seed": session.settings.seed}
    if orders is None:
        workers = session.generation
        return {**same, "worker": workers.worker, "workers": workers.workers}
    return {**same, **orders.identity()}


def _effective(value: Any) -> float:
    if not (is_number(value) and 0 <= value <= _MOST_SAMPLES):
        raise StateMismatch(
            f"the state has effective_samples={value!r}, which is not a finite number from 0; "
            "it is damaged, load another one"
        )
    return float(value)
