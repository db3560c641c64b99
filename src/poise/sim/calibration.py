"""A scenario from what a real training measured, and how well it predicts that training.

Lines, reductions and loaders are those that `poise.core.fit.Fit` believes in after the whole
record: the same estimator that policy "auto" decides by. The error is that of step times which
were held out: whole splits, where there are several, so that the fit has seen none of the steps
that it is asked about.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from poise.core.entries import SHORTEST_S
from poise.core.fit import Fit
from poise.core.limits import Limits
from poise.core.memory import MemoryLine
from poise.core.observation import Change, Observation
from poise.core.plan import Forecast
from poise.core.split import Split
from poise.core.timing import Floats, SpeedModel
from poise.engine.rhythm import SELDOM
from poise.errors import InvalidSetting
from poise.policy import Bounds
from poise.policy.bounds import NO_BOUNDS
from poise.policy.naming import policy_of
from poise.records import Record, Row
from poise.sim.scenario import MOST_CV, MOST_SPIKE, Noise

_WHO = "a calibration"
"""What learns from measured times."""
_FOLDS = 5
_FEWEST = 20
"""Measured steps that a calibration needs,"""
_OF_A_SPLIT = 5
"""and steps of a split that can be held out."""
_SPLITS = 3
"""Fewer different splits are too few to hold one out."""
_SPIKE = 2.0
"""A time so many times as long as usual is a spike."""
_WINDOW = 64
"""Steps that are learned from together at most."""
_GREAT = 0.2
"""A change of a log time that makes what was measured before worthless."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """What a record says of its cluster."""

    model: SpeedModel
    noise: Noise
    global_batch: int
    mode: str
    steps: int
    """Measured steps that it stands on."""
    splits: int
    """Different splits among them."""
    error: float
    """The mean relative error of held-out step times; NaN: nothing could be held out."""
    held_out: int
    """Steps that were held out."""
    measured_s: float
    """The mean step of the last split,"""
    predicted_s: float
    """and what is predicted for it."""
    last_split: Split
    memory: MemoryLine
    memory_limit: Floats
    update_s: float
    """Seconds of an update in the server; 0 where there is none."""
    guessed: tuple[str, ...]
    """What the record does not show, in sentences."""
    bounds: Bounds
    """Of the local batches, as the training stated them."""


def calibrated(*records: Record) -> Calibration:
    """Return what a record says, or those of a training that was restarted; raise for too little.

    Of several, what the last one says of workers, bounds and mode holds; steps of those before
    count as long as the workers are as many.
    """
    record = records[-1]
    workers, global_batch = _last_group(record)
    seen: Sequence[Observation] = _observations(records)
    if len(seen) < _FEWEST:
        silent = _silent(record, workers)
        why = f"worker {silent} never measured any" if silent is not None else "train for longer"
        raise InvalidSetting(
            f"the record has {len(seen)} steps that all of its last {workers} workers "
            f"measured; a calibration needs {_FEWEST}: {why}"
        )
    seen, left, mixed = _since_last_change(seen)
    fit, last = _fitted(seen), seen[-1].split
    batches = np.array([each.split for each in seen])
    same = np.flatnonzero(batches.min(axis=0) == batches.max(axis=0))
    served = record.header.mode is not None
    known = len(same) == workers or mixed or served
    errors = [] if known else _held_out_errors(seen)
    memory, limit = _memory(seen)
    return Calibration(
        model=fit.model(),
        noise=_noise(seen, fit),
        global_batch=global_batch if served else sum(last),
        mode=record.header.mode or "sync",
        steps=len(seen),
        splits=len({each.split for each in seen}),
        error=float(np.mean(errors)) if errors else float("nan"),
        held_out=len(errors),
        measured_s=_usual_s([each for each in seen if each.split == last]),
        predicted_s=_predicted_s(fit, last),
        last_split=last,
        memory=memory,
        memory_limit=limit,
        update_s=_update_s(record),
        guessed=(*left, *_missing(records), *_guessed(seen, same, served=served)),
        bounds=_bounds(record, batches),
    )


def _last_group(record: Record) -> tuple[int, int]:
    """Return how many workers there were last, and their global batch."""
    changes = [change for row in record.rows if (change := _change(row)) is not None]
    if not changes:
        return record.header.workers, record.header.global_batch
    return len(changes[-1].origin), changes[-1].global_batch


def _change(row: Row) -> Change | None:
    """Return how the workers changed, in a row or in those that are missing there."""
    return row.change if row.lost is None else row.lost.change


def _silent(record: Record, workers: int) -> int | None:
    """Return a worker that measured nothing while others did."""
    heard = np.zeros(workers, dtype=bool)
    for each in (row.observation for row in record.rows):
        if each is not None and each.ready_s is not None and len(each.ready_s) == workers:
            heard |= ~np.isnan(each.ready_s).any(axis=1)
    return int(np.flatnonzero(~heard)[0]) if heard.any() and not heard.all() else None


def _observations(records: Sequence[Record]) -> list[Observation]:
    """Return the measured steps of the workers that were there last."""
    seen: list[Observation] = []
    workers, mode = records[0].header.workers, records[0].header.mode
    for record in records:
        if (record.header.workers, record.header.mode) != (workers, mode):
            seen = []
        workers, mode = record.header.workers, record.header.mode
        for row in record.rows:
            change = _change(row)
            if change is not None and change.origin != tuple(range(workers)):
                seen, workers = [], len(change.origin)
            each = row.observation
            if each is None or each.compiling or each.ready_s is None:
                continue
            if each.ready_s.shape[0] != workers or np.isnan(each.ready_s).any():
                continue
            if ((each.batches == 0) | (each.ready_s[:, -1] >= SHORTEST_S)).all():
                seen.append(each)
    return [each for each in seen if each.times(_WHO).shape == seen[-1].times(_WHO).shape]


def _missing(records: Sequence[Record]) -> list[str]:
    """Return what could not be recorded, in sentences."""
    return [
        f"{lost} are missing in the record, since they could not be written"
        for record in records
        for lost in record.lost
    ]


def _fitted(seen: Sequence[Observation]) -> Fit:
    """Learn from steps in their order, those of one split together."""
    fit = Fit.start(*seen[0].times(_WHO).shape)
    for start in range(0, len(seen), _WINDOW):
        fit, _ = fit.update(*seen[start : start + _WINDOW])
    return fit


def _bounds(record: Record, batches: NDArray[np.int64]) -> Bounds:
    """Return the bounds of the policy, or none where workers are others than it was made for."""
    name = record.header.policy
    bounds = NO_BOUNDS if name is None else getattr(policy_of(name), "bounds", NO_BOUNDS)
    workers = batches.shape[1]
    stated = (bounds.min_batch, bounds.max_batch, bounds.multiple_of)
    if any(isinstance(each, tuple) and len(each) != workers for each in stated):
        bounds = NO_BOUNDS
    return replace(bounds, min_batch=0) if (batches == 0).any() else bounds


def _since_last_change(
    seen: Sequence[Observation],
) -> tuple[Sequence[Observation], list[str], bool]:
    """Return the steps since a worker last became much faster or slower, and what to say of it.

    Where too few follow, all of them, and what comes out is a mixture.
    """
    fit = Fit.start(*seen[0].times(_WHO).shape)
    begin, who = 0, ""
    for number in range(0, len(seen), SELDOM):
        fit, alarms = fit.update(*seen[number : number + SELDOM])
        great = [worker for worker in alarms if abs(np.log(fit.changed_by[worker])) > _GREAT]
        if great:
            begin, who = min(number + SELDOM, len(seen)), _listed(np.array(great))
    if not who:
        return seen, [], False
    if len(seen) - begin < _FEWEST:
        said = (
            f"the speed of worker {who} changed after step {seen[begin - 1].step}, and too few "
            "steps follow: speeds are a mixture of before and after"
        )
        return seen, [said], True
    said = (
        f"the speed of worker {who} changed at about step {seen[begin].step}; only what follows "
        "counts"
    )
    return seen[begin:], [said], False


def _predicted_s(fit: Fit, split: Split) -> float:
    """Return the mean step that the fit expects, scatter included."""
    model = fit.model()
    limits = Limits.of(model.workers, min_batch=0)
    return Forecast(model, limits, model.step_s(split), fit.cv).step_s(split)


def _held_out_errors(seen: Sequence[Observation]) -> list[float]:
    """Return, for each held-out group of steps, how far off its mean step time is predicted.

    Groups are the steps of one split; where there are fewer than three splits, fifths of the
    record in their order.
    """
    groups = _groups(seen)
    folds = [groups[number::_FOLDS] for number in range(min(_FOLDS, len(groups)))]
    errors: list[float] = []
    for fold in folds:
        left_out = {index for group in fold for index in group}
        rest = [each for index, each in enumerate(seen) if index not in left_out]
        if len(rest) < _FEWEST // 2:
            continue
        fit = _fitted(rest)
        for group in fold:
            measured_s = _usual_s([seen[index] for index in group])
            predicted_s = _predicted_s(fit, seen[group[0]].split)
            if measured_s > 0:
                errors.append(abs(predicted_s / measured_s - 1))
    return errors


def _groups(seen: Sequence[Observation]) -> list[list[int]]:
    by_split: dict[Split, list[int]] = {}
    for index, each in enumerate(seen):
        by_split.setdefault(each.split, []).append(index)
    long = [group for group in by_split.values() if len(group) >= _OF_A_SPLIT]
    if len(long) >= _SPLITS:
        return long
    parts = np.array_split(np.arange(len(seen)), _FOLDS)
    return [part.tolist() for part in parts if len(part)]


def _usual_s(steps: Sequence[Observation]) -> float:
    """Return the mean step; what a spike made much longer is left out."""
    lengths = np.array([each.length_s for each in steps], dtype=np.float64)
    return float(lengths[lengths <= _SPIKE * np.median(lengths)].mean())


def _noise(seen: Sequence[Observation], fit: Fit) -> Noise:
    """Return how times scatter; what is far beyond is a spike."""
    squares, products, count = fit.deviations.sum(axis=0)
    correlation = float(np.clip(products / squares, 0.0, 0.95)) if squares > 0 else 0.0
    ratios: list[Floats] = []
    for split in {each.split for each in seen}:
        table = np.array([each.times(_WHO)[:, -1] for each in seen if each.split == split])
        if len(table) >= _OF_A_SPLIT:
            ratios.append((table / np.median(table, axis=0)).ravel())
    every = np.concatenate(ratios) if ratios else np.ones(1)
    spikes = every[every > _SPIKE]
    calm = np.log(every[(every <= _SPIKE) & (every > 0)])
    cv = float(calm.std()) if ratios else float(np.sqrt(squares / max(count, 1.0)))
    return Noise(
        cv=min(cv, MOST_CV),
        correlation=correlation,
        spike_chance=float(spikes.size / every.size),
        spike=min(float(np.median(spikes)), MOST_SPIKE) if spikes.size else 1.0,
    )


def _memory(seen: Sequence[Observation]) -> tuple[MemoryLine, Floats]:
    line, limit = MemoryLine.unknown(len(seen[0].split)), np.full(len(seen[0].split), np.nan)
    for each in seen:
        if each.memory_bytes is not None and each.memory_limit_bytes is not None:
            line = line.update(each.split, each.memory_bytes)
            known = ~np.isnan(each.memory_limit_bytes)
            limit = np.where(known, each.memory_limit_bytes, limit)
    return line, limit


def _update_s(record: Record) -> float:
    served = [row.served for row in record.rows if row.served is not None]
    if not served or not sum(served[-1].updates):
        return 0.0
    return served[-1].busy_s / sum(served[-1].updates)


def _guessed(seen: Sequence[Observation], same: NDArray[np.intp], *, served: bool) -> list[str]:
    """Return what the record does not show; some workers had the same local batch throughout."""
    sentences = []
    if same.size:
        who = "every worker" if same.size == len(seen[0].split) else f"worker {_listed(same)}"
        sentences.append(
            f"{who} had one local batch only, so how much of its time is fixed is a guess"
        )
    if served:
        sentences.append("what a gradient takes to travel is not recorded, and counts as 0")
    elif all(each.done_s is None or np.isnan(each.done_s).all() for each in seen):
        sentences.append("what the exchange of gradients takes was not measured, and counts as 0")
    return sentences


def _listed(workers: NDArray[np.intp]) -> str:
    return ", ".join(str(int(worker)) for worker in workers[:8])
