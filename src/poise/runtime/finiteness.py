"""Says once which worker's gradient was the first that was not finite, and at which step.

An adapter tells `NotFinite` of this worker's own part before it is summed. Nothing is said of a
gradient that no optimizer uses, as when a GradScaler leaves a step out, unless that goes on.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from poise.core.finiteness import UNUSED_IN_A_ROW, Claim, culprits, message, speaks
from poise.errors import PoiseWarning
from poise.runtime.events import Applied, Events, NotFinite, Resumed
from poise.runtime.peers import Peers


class Finiteness:
    """What this worker found of its own gradients, and the others of theirs."""

    def __init__(self, peers: Peers, used: Callable[[Any], bool] = lambda _: True) -> None:
        """Say that all was finite so far.

        Args:
            peers: who trains together.
            used: whether an optimizer that stepped has used its gradient.
        """
        self._peers = peers
        self._used = used
        self._own: Claim | None = None
        self._told = False
        self._hears_updates = False

    def listen(self, events: Events) -> None:
        """Hear of gradients that are not finite; of updates only from the first of them on."""
        events.on(NotFinite, self._not_finite)
        events.on(Resumed, self._resumed)

    def _resumed(self, _: Resumed) -> None:
        """Training goes on elsewhere, perhaps with other workers, and with other weights."""
        self._own, self._told = None, False
        self._leave()

    def _not_finite(self, event: NotFinite) -> None:
        if self._told:
            return
        if not self._hears_updates:
            self._peers.events.on(Applied, self._applied)
            self._hears_updates = True
        before, own = self._own, Claim(event.step, event.step, event.weights)
        if before is not None:
            own = before.at(event.step, weights=event.weights)
        own = replace(own, used=own.used or event.used)
        if own != before:
            self._own = own
            self._leave()
        if own.used or own.in_a_row >= UNUSED_IN_A_ROW:
            self._tell(own)

    def _applied(self, event: Applied) -> None:
        own = self._own
        if own is None or self._told or event.step != own.last or not self._used(event.optimizer):
            return
        own = self._own = replace(own, used=True)
        self._leave()
        self._tell(own)

    def _tell(self, own: Claim) -> None:
        me = self._peers.generation.worker
        claims = {me: own}
        for worker, text in self._peers.liveness.notes().items():
            claim = Claim.from_json(text)
            if claim is not None:
                claims[worker] = claim
        blamed = culprits(own, claims)
        self._told = True
        if speaks(me, blamed):
            first = replace(claims[blamed[0]], used=own.used)  # it may not have said so yet
            text = message(blamed, first, self._peers.generation.workers)
            warnings.warn(text, PoiseWarning, stacklevel=2)

    def _leave(self) -> None:
        """Leave word of this worker, so that the others need not wait for it."""
        self._peers.liveness.note("" if self._own is None else self._own.to_json())
