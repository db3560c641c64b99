"""Whose steps a pass over data is: those of the training, or of an evaluation."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from poise.core.batch import Batch
from poise.core.plan import Plan
from poise.runtime.batches import Place
from poise.runtime.session import Session

_UNMEASURED = nullcontext()


class TrainingPass:
    """The steps of the training, from the first sample that is not consumed."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def global_batch(self) -> int:
        """That of the batch handed out last."""
        return self._session.plan.global_batch

    def begin(self, *, anew: bool = False) -> Place:
        """Start where training stands, or, anew, with the next epoch if this one was left early."""
        return self._session.begin_pass(anew=anew)

    def await_plan(self, step: int) -> Plan:
        """Return the plan of a step."""
        return self._session.exchange.await_plan(step)

    def loading(self) -> AbstractContextManager[None]:
        """Measure how long it takes, if anybody wants to know."""
        return _UNMEASURED if self._session.exchange.silent else self._session.fetching

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Note the batch, and tell the other workers where that is needed."""
        self._session.hand_out(batch, contents)

    def end(self, position: int) -> None:
        """The epoch is over if all its samples are consumed."""
        self._session.end_pass(position)


class EvaluationPass:
    """The steps of an evaluation, by the shares of the plan in effect."""

    def __init__(self, session: Session, global_batch: int) -> None:
        self._session = session
        self._plan = session.plan
        self.global_batch = global_batch

    def begin(self, *, anew: bool = False) -> Place:
        """Start at the beginning."""
        self._session.disturb()
        self._plan = self._session.plan.scaled(self.global_batch)
        return Place(0, 0, 0)

    def await_plan(self, step: int) -> Plan:
        """Return the plan in effect when the pass began, for the evaluation's own batch size."""
        return self._plan

    def loading(self) -> AbstractContextManager[None]:
        """Nothing is measured."""
        return _UNMEASURED

    def hand_out(self, batch: Batch, contents: Any) -> None:
        """Nothing to note."""

    def end(self, position: int) -> None:
        """Nothing to note."""
