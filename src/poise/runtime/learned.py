"""What an engine has learned, as plain values that survive a checkpoint, and its reuse.

Speeds belong to devices: after a resume each worker gets what was known of a worker on a device
of its kind. A kind that is new counts as the mean of the others until it is measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from poise.core.learning_rate import gain_within
from poise.core.membership import Identity, origins
from poise.core.observation import Change
from poise.core.plan import Plan
from poise.core.split import Split, check_split
from poise.engine.bsp import Engine
from poise.errors import PoiseError, StateMismatch
from poise.numbers import is_number

_MOST_GAIN = 1e12


@dataclass(frozen=True)
class Known:
    """What a saved state says of splits and speeds, as far as it holds for the workers now."""

    split: Split | None
    """The split that all workers go on with; None: theirs is another cluster."""
    global_batch: int
    """What they go on with in any case,"""
    gain: float
    """and what a step of it is worth."""
    engine: Engine
    """As it was saved; where nothing was, one that knows nothing."""
    change: Change | None
    """From the workers it knew to those there are now; None: they are the same."""

    def go_on(self, start_step: int) -> tuple[Plan | None, Engine]:
        """Return a plan to announce, if any, and the engine that goes on with these workers."""
        if self.change is not None:
            return self.engine.update([self.change], start_step)
        engine = self.engine
        if (engine.split, engine.gain) == (self.split, self.gain):
            return None, engine
        return Plan(engine.split, start_step, engine.gain, why="decided before the resume"), engine

    @staticmethod
    def of(state: Mapping[str, Any], fresh: Engine, kinds: Sequence[str]) -> "Known":
        """Read a state, the same on all workers but for the engine; raise if it is damaged.

        Args:
            state: of a balancer, perhaps with another policy or without one that learns.
            fresh: the engine now, which knows nothing.
            kinds: of the workers' devices now.
        """
        if state.get("policy") != type(fresh.policy).__name__:
            same = Change(tuple(range(len(kinds))), fresh.global_batch)
            return Known(None, fresh.global_batch, 1.0, fresh, same)
        try:
            before = _kinds(state["kinds"], state["split"])
            split = check_split(state["split"], len(before), sum(state["split"]))
            global_batch = fresh.nearest(sum(split))
            gain = _checked_gain(state.get("gain", 1.0), global_batch, fresh)
            engine, change = fresh, Change(tuple(range(len(kinds))), global_batch)
            if state["engine"] is not None:
                engine = fresh.load_state_dict(state["engine"])
                origin = origins(
                    [Identity(each) for each in before], [Identity(each) for each in kinds]
                )
                change = Change(origin, fresh.nearest(engine.global_batch))
            engine.update([change], 0)  # states are pure: this only shows whether it holds
        except (ArithmeticError, LookupError, TypeError, ValueError, PoiseError) as error:
            raise StateMismatch(
                f"what the state says of the split and of speeds is damaged: {error}; load another "
                "one, or leave out its policy to start anew"
            ) from error
        fits = before == list(kinds) and sum(split) == global_batch and _allowed(fresh, split)
        if not fits:
            return Known(None, global_batch, gain, engine, change)
        goes_on = (
            state["engine"] is not None
            and engine.global_batch == change.global_batch == sum(engine.split)
            and _allowed(fresh, engine.split)
        )
        return Known(split, global_batch, gain, engine, None if goes_on else change)


def _kinds(saved: Any, split: Any) -> list[str]:
    if not isinstance(saved, list | tuple) or not all(isinstance(kind, str) for kind in saved):
        raise ValueError(f"kinds={saved!r}")
    if len(saved) != len(split):
        raise ValueError(f"kinds={saved!r} and split={split!r} are not of as many workers")
    return list(saved)


def _checked_gain(gain: Any, global_batch: int, engine: Engine) -> float:
    if not (is_number(gain) and 0 < gain <= _MOST_GAIN):
        raise ValueError(f"gain={gain!r}")
    if engine.adapt is None:
        return 1.0
    return gain_within(float(gain), global_batch / engine.start_batch)


def _allowed(engine: Engine, split: Split) -> bool:
    """Whether the policy's own bounds, if it has any, allow a split."""
    bounds = getattr(engine.policy, "bounds", None)
    return bounds is None or bounds.limits(len(split)).allow(split)
