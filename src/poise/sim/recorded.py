"""A recorded training as the world of the simulator: same measurements, same decisions.

`poise.records.replay` takes over when what was measured reached the engine. Here the simulator's
own rhythm says that, and its own plans say which split each step has: if it drives the engine as
live training does, every row comes out as it was recorded.
"""

from poise.errors import InvalidSetting
from poise.policy import Policy
from poise.policy.naming import policy_of
from poise.records import Difference, Record
from poise.records.rows import Decided
from poise.sim.training import Training


def followed(record: Record, *, lead: int, policy: Policy | None = None) -> Difference | None:
    """Feed a record through the simulator; return the first row that comes out otherwise.

    Args:
        record: of a synchronous training whose workers stayed.
        lead: steps by which its loaders ran ahead; `poise doctor` tells it.
        policy: needed if the record was made by a policy of your own.
    """
    if policy is None:
        if record.header.policy is None:
            raise InvalidSetting("the record was made by a policy of your own; pass policy=...")
        policy = policy_of(record.header.policy)
    training = Training(record.header.engine(policy), lead)
    recorded = {row.decision.start_step: row for row in record.rows if row.decision is not None}
    for number, row in enumerate(record.rows):
        seen = row.observation
        if seen is None or row.loaded is not None:
            raise InvalidSetting(
                f"row {number} of the record is no step: workers changed, a training was "
                "resumed or rows are missing, which no scenario of steps has; use "
                "poise.records.replay"
            )
        plan = training.plan_at(seen.step)
        split = plan.scaled(sum(seen.split)).split
        if split != seen.split:
            simulated = Decided(split, plan.start_step, plan.gain, plan.why)
            known = [step for step in recorded if step <= seen.step]
            was = recorded[max(known)].decision if known else None
            return Difference(number, seen.step, was, simulated)
        training.tell(seen)
    return None
