"""The place in a training as plain values that survive a checkpoint."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from poise.core.plain import whole_in
from poise.engine.progress import Progress
from poise.errors import OutOfOrder, StateMismatch
from poise.torch.loader import ShareLoader
from poise.torch.orders import Orders
from poise.torch.run import Run
from poise.torch.stream import StreamLoader

Saved = dict[str, Any]
"""Numbers and text; for a stream also what its data set says of itself."""

_VERSION = 3
_PLACE = ("epoch", "position", "step", "samples", "skipped")


def saved_place(
    run: Run, orders: Orders | None, loader: ShareLoader | StreamLoader, seed: int
) -> Saved:
    """Return where training stands: samples whose gradient is reduced count as used."""
    progress = run.progress
    if progress.unapplied:
        raise OutOfOrder(
            f"state_dict was called between backward and optimizer.step() of step "
            f"{progress.step - 1}, when the samples are consumed but not learned from; "
            "call it after optimizer.step()"
        )
    place: Saved = {name: getattr(progress, name) for name in _PLACE}
    place["effective_samples"] = progress.effective_samples
    if orders is not None:
        place["drawn"] = orders.drawn(progress.epoch) if progress.position else ""
    if isinstance(loader, StreamLoader):
        place["stream"] = loader.states_before if progress.unreduced else loader.states
    return {**_identity(run, orders, seed), **place}


def load_place(
    state: Mapping[str, Any],
    run: Run,
    orders: Orders | None,
    loader: ShareLoader | StreamLoader,
    seed: int,
) -> None:
    """Set the place in the training to a saved one, or raise if it is another training's."""
    for key, value in _identity(run, orders, seed).items():
        if state.get(key) != value:
            raise StateMismatch(
                f"the state has {key}={state.get(key)!r} and this training {key}={value!r}; "
                "resume with the data set, shuffling and seed it was saved with"
                + ("" if orders is not None else ", each worker from the state it saved itself")
            )
    place = {name: whole_in(state, name) for name in _PLACE}
    if isinstance(loader, StreamLoader):
        _load_stream(state, loader, place["position"])
    if orders is not None:
        orders.expect(place["epoch"], place["position"], state.get("drawn", ""))
    effective = _effective(state.get("effective_samples", place["samples"]))
    run.progress = replace(Progress(), **place, effective_samples=effective)  # type: ignore[arg-type]


def _load_stream(state: Mapping[str, Any], loader: StreamLoader, position: int) -> None:
    places = state.get("stream") or {}
    if position and not places:
        raise StateMismatch(
            "the state is from the middle of a stream that cannot say where it stands; give "
            "the data set state_dict and load_state_dict, or save at the end of an epoch"
        )
    if position:
        loader.resume(places)


def _identity(run: Run, orders: Orders | None, seed: int) -> Saved:
    """What must be the same for a state to belong to a training."""
    same: Saved = {"version": _VERSION, "seed": seed}
    if orders is None:
        return {**same, "worker": run.cluster.worker, "workers": run.cluster.workers}
    return {**same, **orders.identity()}


def _effective(value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and 0 <= value < math.inf):
        raise StateMismatch(
            f"the state has effective_samples={value!r}, which is not a finite number from 0; "
            "it is damaged, load another one"
        )
    return float(value)
