"""Replaying a record: the same observations give the same decisions."""

import json
from dataclasses import dataclass
from typing import Any

from poise.core.observation import Event
from poise.errors import InvalidSetting, StateMismatch
from poise.policy import Policy
from poise.policy.naming import policy_of
from poise.records.rows import Decided, Record


@dataclass(frozen=True)
class Difference:
    """The first row on which a replay decides otherwise."""

    row: int
    """Its number among the rows, from 0."""
    step: int | None
    """The step it tells of; None where workers came or went."""
    recorded: Decided | None
    replayed: Decided | None

    def __str__(self) -> str:
        where = "a change of workers" if self.step is None else f"step {self.step}"
        return (
            f"row {self.row} ({where}): recorded {_shown(self.recorded)}, "
            f"replayed {_shown(self.replayed)}"
        )


def replay(record: Record, policy: Policy | None = None) -> Difference | None:
    """Run the engine on the recorded events; return the first difference, or None.

    Args:
        record: as `read_record` returns it.
        policy: needed if the record was made by a policy of your own; or another policy, to see
            where it would have decided differently.
    """
    if record.header.thinned is not None:
        raise InvalidSetting(
            f"of {record.header.thinned} decisions the record holds one, since it is that of a "
            "large simulation, and what was left out cannot be decided again; simulate it again"
        )
    if policy is None:
        if record.header.policy is None:
            raise InvalidSetting(
                "the record was made by a policy that is not one of Poise's own; "
                "pass it: replay(record, policy=...)"
            )
        policy = policy_of(record.header.policy)
    _, engine = record.header.engine(policy).start()
    together: list[Event] = []
    for number, row in enumerate(record.rows):
        if row.lost is not None:
            raise InvalidSetting(
                f"{row.lost} are missing in the record before row {number + 1}, since they could "
                "not be written; the rows before are decided as recorded, and what follows cannot "
                "be decided again; replay(record.before_loss) leaves it out"
            )
        event = row.observation or row.change
        if row.loaded is not None:
            engine = engine.load_state_dict(_loaded(number, row.loaded))
            if event is None:
                continue
        if event is None:
            raise InvalidSetting(f"row {number} of the record holds neither a step nor a change")
        together.append(event)
        if row.more:
            continue
        plan, engine = engine.update(together, row.start_step)
        together = []
        found = Decided.of(plan)
        if found != row.decision:
            step = None if row.observation is None else row.observation.step
            return Difference(number, step, row.decision, found)
    return None


def _loaded(number: int, text: str) -> Any:
    """Return a state that a row holds as text, or raise."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StateMismatch(f"loaded of row {number} of the record is no JSON: {error}") from None


def _shown(decision: Decided | None) -> str:
    if decision is None:
        return "no change"
    return f"{list(decision.split)} from step {decision.start_step}"
