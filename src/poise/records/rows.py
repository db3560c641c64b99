"""What a record consists of: a header, then one row per step, in arrays over workers."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from poise.core.entries import LONGEST_S, check_local_batches, check_within
from poise.core.limits import UNLIMITED
from poise.core.observation import Change, Observation
from poise.core.plain import MOST_COUNTED
from poise.core.plan import Plan
from poise.core.split import Split
from poise.engine.adaptation import Adaptation
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.engine.modes import mode_of
from poise.errors import InvalidSetting
from poise.numbers import check_whole
from poise.policy import Policy
from poise.policy.naming import PolicyName, named

FORMAT = "poise-record"
VERSION = 2
_MOST_WORKERS = 10**6


@dataclass(frozen=True)
class Decided:
    """A plan as a row holds it; what was predicted is found again by replaying."""

    split: Split
    start_step: int
    gain: float
    why: str

    def check_loaded(self) -> None:
        """Raise unless it can be a plan."""
        check_local_batches("split", self.split)
        check_within("start_step", self.start_step, 0, MOST_COUNTED)
        check_within("gain", self.gain, 1e-12, 1e12)

    @staticmethod
    def of(plan: Plan | None) -> "Decided | None":
        """Return a plan's decision; None: no change was decided."""
        return None if plan is None else Decided(plan.split, plan.start_step, plan.gain, plan.why)


@dataclass(frozen=True)
class Header:
    """The first line: what the engine was at the start."""

    format: str
    version: int
    policy: PolicyName | None
    """None for a policy that is not one of Poise's own; a replay is given it."""
    workers: int
    global_batch: int
    adapt: Adaptation | None = None
    mode: str | None = None
    """Of a training with a server; None: all workers take every step together."""
    thinned: int | None = None
    """Of so many decisions without a change one is here; None: all of them."""

    def check_loaded(self) -> None:
        """Raise unless it can be the start of an engine."""
        check_whole("it", "workers", self.workers, 1, _MOST_WORKERS)
        check_whole("it", "global_batch", self.global_batch, 1, UNLIMITED)
        if self.mode is not None:
            mode_of(self.mode)

    @staticmethod
    def of(engine: Engine, mode: str | None = None, thinned: int = 1) -> "Header":
        """Return the header of an engine's record."""
        policy = named(engine.policy)
        workers, global_batch = engine.workers, engine.global_batch
        left_out = thinned if thinned > 1 else None
        return Header(FORMAT, VERSION, policy, workers, global_batch, engine.adapt, mode, left_out)

    def engine(self, policy: Policy) -> Engine:
        """Return an engine as it was at the start."""
        return Engine(policy, self.workers, self.global_batch, self.adapt)


@dataclass(frozen=True)
class Served:
    """What a server did since the training began, worker by worker."""

    workers: tuple[int, ...]
    """Their numbers, of those that are there, as in the arrays of the row."""
    updates: tuple[int, ...]
    staleness: tuple[Mapping[int, int], ...]
    """How many updates of each worker were how stale."""
    dropped: tuple[int, ...]
    """Pushes that were not finite."""
    waited_s: tuple[float, ...]
    """Seconds that each worker's pushes waited in the server."""
    busy_s: float
    """Seconds in which the server applied gradients or copied weights."""

    def check_loaded(self) -> None:
        """Raise unless the counts can be of these workers."""
        columns = (self.updates, self.staleness, self.dropped, self.waited_s)
        if any(len(each) != len(self.workers) for each in columns):
            raise InvalidSetting("workers, updates, staleness, dropped, waited_s are not as many")
        for name, values in (("updates", self.updates), ("waited_s", self.waited_s)):
            for each in values:
                check_within(name, each, 0, MOST_COUNTED)
        check_within("busy_s", self.busy_s, 0, LONGEST_S)

    @staticmethod
    def of(engine: AsyncEngine, busy_s: float) -> "Served":
        """Return what an engine has counted."""
        tallies = [member.tally for member in engine.members]
        return Served(
            tuple(member.worker for member in engine.members),
            tuple(tally.updates for tally in tallies),
            tuple(tally.staleness for tally in tallies),
            tuple(tally.dropped for tally in tallies),
            tuple(tally.waited_s for tally in tallies),
            busy_s,
        )


@dataclass(frozen=True, eq=False)
class Lost:
    """Rows that could not be written, nor kept until they could."""

    rows: int
    first_step: int | None = None
    """The first and the last step that they told of; None: of changes only."""
    last_step: int | None = None
    change: Change | None = None
    """The last change of workers or of the global batch among them."""

    def and_row(self, row: "Row") -> "Lost":
        """Return what is lost with one more row."""
        step = self.last_step if row.observation is None else row.observation.step
        first = step if self.first_step is None else self.first_step
        return Lost(self.rows + 1, first, step, row.change or self.change)

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows:,} rows"
        if self.first_step is None:
            return rows
        if self.first_step == self.last_step:
            return f"{rows} (step {self.first_step})"
        return f"{rows} (steps {self.first_step} to {self.last_step})"


@dataclass(frozen=True, eq=False)
class Row:
    """What happened, and what was decided on it: an observation or a change."""

    start_step: int
    """The first step that could still change."""
    observation: Observation | None = None
    change: Change | None = None
    loaded: str | None = None
    """The engine's saved state, as JSON, from which a resumed training goes on; with a change if
    the workers are others, and else with what was decided before."""
    decision: Decided | None = None
    served: Served | None = None
    """With a server: what it has done so far."""
    more: bool | None = None
    """Whether the next row was known too when the decision was made, which then stands there."""
    lost: Lost | None = None
    """Instead of an event: rows that are missing here."""

    def check_loaded(self) -> None:
        """Raise unless the step can be one."""
        check_within("start_step", self.start_step, 0, MOST_COUNTED)


@dataclass(frozen=True, eq=False)
class Record:
    """A record as it was read."""

    header: Header
    rows: tuple[Row, ...]
    complete: bool
    """False if the last line was cut off, as when the process was killed."""

    @property
    def lost(self) -> tuple[Lost, ...]:
        """What is missing in the middle, as after a full disk."""
        return tuple(row.lost for row in self.rows if row.lost is not None)

    @property
    def before_loss(self) -> "Record":
        """The record up to the first row that is missing; it can be replayed."""
        known = itertools.takewhile(lambda row: row.lost is None, self.rows)
        return replace(self, rows=tuple(known), complete=self.complete and not self.lost)
