"""What every policy must hold, as a list of laws that third parties can run on theirs.

    from poise.sim.conformance import check
    check(MyPolicy(), workers=3, global_batch=48)

Each law raises AssertionError with the reason if it is broken.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from poise.core.observation import Change, Observation
from poise.core.plain import from_plain, to_json
from poise.core.split import Split, check_split, even_split
from poise.core.timing import SpeedModel
from poise.engine.bsp import Engine
from poise.errors import InfeasibleSplit, InvalidSetting
from poise.policy import Policy
from poise.sim.scenario import Noise
from poise.sim.simulate import observe, simulate

Law = Callable[[Policy, int, int], None]

_STEPS = 240
_EPOCH = 20


def check(policy: Policy, *, workers: int, global_batch: int) -> None:
    """Raise AssertionError unless the policy holds every law on a cluster of that size."""
    for law in LAWS:
        law(policy, workers, global_batch)


def starts_with_a_whole_split(policy: Policy, workers: int, global_batch: int) -> None:
    """The first schedule has step 0, and each split divides the global batch over the workers."""
    schedule, _ = policy.init(workers, global_batch)
    assert 0 in schedule, "the schedule has no split for step 0"
    for split in schedule.values():
        check_split(split, workers, global_batch)


def decides_the_same_again(policy: Policy, workers: int, global_batch: int) -> None:
    """Equal states and events give equal decisions and states, and the old state stays."""
    for step, (engine, event) in enumerate(_course(policy, workers, global_batch, steps=12)):
        before = to_json(engine.state)
        first, state = policy.update(engine.state, [event])
        second, again = policy.update(engine.state, [event])
        assert first == second, f"step {step} is decided differently the second time"
        assert to_json(state) == to_json(again), "states differ though nothing else does"
        assert to_json(engine.state) == before, "update changed the state it was given"


def survives_json(policy: Policy, workers: int, global_batch: int) -> None:
    """A state that went through JSON goes on as if it had not."""
    for step, (engine, event) in enumerate(_course(policy, workers, global_batch, steps=60)):
        saved = json.loads(to_json(engine.state))
        restored: Any = from_plain(policy.state_type, saved)
        plan, after = engine.update([event], step + 2)
        decision, state = policy.update(restored, [event])
        assert (plan and plan.split) == (decision and decision.split), f"step {step} differs"
        assert to_json(state) == to_json(after.state), "the restored state went another way"


def settles(policy: Policy, workers: int, global_batch: int) -> None:
    """On a constant cluster without noise the split stops changing, and is not worse than even."""
    truth = _truth(workers)
    course = simulate(
        policy, lambda _: truth, global_batch=global_batch, steps=_STEPS, epoch_steps=_EPOCH
    )
    late = [plan for plan in course.plans if plan.start_step > 3 * _STEPS // 4]
    assert not late, f"the split still changes at step {late[0].start_step}"
    if policy.online:
        even = truth.step_s(even_split(workers, global_batch))
        assert course.step_s[-1] <= even * (1 + 1e-9), "it settles on a split worse than even"


def keeps_the_global_batch(policy: Policy, workers: int, global_batch: int) -> None:
    """Under noise and drift every split divides the global batch."""
    slow = SpeedModel.of([0.01] * workers, [0.004] * (workers - 1) + [0.016])
    course = simulate(
        policy,
        lambda step: _truth(workers) if step < _STEPS // 2 else slow,
        global_batch=global_batch,
        steps=_STEPS,
        noise=Noise(cv=0.2, correlation=0.5),
        epoch_steps=_EPOCH,
    )
    for split in course.splits:
        check_split(split, workers, global_batch)


def bears_silence(policy: Policy, workers: int, global_batch: int) -> None:
    """A worker that reports nothing for a while stops nothing."""
    for _ in _course(policy, workers, global_batch, steps=40, silence=True):
        pass


def follows_changes(policy: Policy, workers: int, global_batch: int) -> None:
    """Other workers, or another global batch, get a split at once, or a clear refusal."""
    *_, (engine, _) = _course(policy, workers, global_batch, steps=11)
    changes = [
        Change.of(workers, global_batch=2 * global_batch),
        Change.of(workers, global_batch=global_batch, joined=1),
    ]
    if workers > 1:
        changes.append(Change.of(workers, global_batch=global_batch, left=[0]))
    for change in changes:
        try:
            plan, after = engine.update([change], 12)
        except (InvalidSetting, InfeasibleSplit):
            continue
        assert plan is not None, f"no decision follows {change}"
        check_split(plan.split, len(change.origin), change.global_batch)
        event = _step(len(change.origin), 12, plan.split)
        after.update([event], 14)


LAWS: tuple[Law, ...] = (
    starts_with_a_whole_split,
    decides_the_same_again,
    survives_json,
    settles,
    keeps_the_global_batch,
    bears_silence,
    follows_changes,
)


def _truth(workers: int) -> SpeedModel:
    """Return workers of which each is slower than the one before."""
    slowness = np.linspace(1, 3, workers)
    lines = np.outer(slowness, [0.6, 1.0])
    return SpeedModel.of(0.005 * lines, 0.002 * lines, [0.002, 0.001])


def _course(
    policy: Policy, workers: int, global_batch: int, *, steps: int, silence: bool = False
) -> Iterator[tuple[Engine, Observation]]:
    """Train such workers; yield the engine before each step, and what it is told of the step.

    Args:
        policy: the rule that is tried.
        workers: how many there are.
        global_batch: samples per step.
        steps: how many steps to take.
        silence: whether one worker or another reports nothing in every second step.
    """
    timetable, engine = Engine(policy, workers, global_batch).start()
    for step in range(steps):
        silent = step % 7 if silence and step % 2 else None
        event = _step(workers, step, timetable.at(step).split, silent)
        yield engine, event
        plan, engine = engine.update([event], step + 2)
        timetable = timetable if plan is None else timetable.announce(plan)


def _step(workers: int, step: int, split: Split, silent: int | None = None) -> Observation:
    """Return what such workers measure, with a scatter that depends on the step alone."""
    scatter = 1 + 0.05 * np.sin(1.7 * step + 2.3 * np.arange(workers))
    hidden = np.array([worker == silent for worker in range(workers)])
    epoch = step // _EPOCH
    seen = observe(_truth(workers), step, epoch, split, np.where(hidden, 1.0, scatter))
    rows: dict[str, Any] = {
        name: np.where(hidden if values.ndim == 1 else hidden[:, None], np.nan, values)
        for name in ("ready_s", "done_s", "wait_s", "input_s")
        if (values := getattr(seen, name)) is not None
    }
    return Observation(step, split, epoch, **rows)
