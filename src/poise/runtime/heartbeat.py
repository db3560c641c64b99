"""Leaves this worker's sign of life at the rendezvous, and brings those of the others.

This thread alone talks with the rendezvous, and nobody waits for it without a limit: it may stop
in the middle of a call when the process that hosts the rendezvous is stopped.
"""

import threading
import time
from collections.abc import Callable

from poise.core.liveness import Blame, Heard, Limits, Sign
from poise.runtime.generation import Generation
from poise.runtime.rendezvous import Rendezvous, RendezvousLost

_NONE = "none"
"""Stands where a cause would, until there is one."""


class Heartbeat(threading.Thread):
    """One worker's exchange with the rendezvous, beat by beat."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        generation: Generation,
        sign: Callable[[], Sign],
        limits: Limits,
    ) -> None:
        """Prepare; `start` begins.

        Args:
            rendezvous: where signs are left.
            generation: whose they are; those of others are not mixed up with them.
            sign: returns what this worker says of itself; asked from this thread.
            limits: says how often.
        """
        super().__init__(name="poise-heartbeat", daemon=True)
        self.heard = Heard()
        self.lost: str | None = None
        """What the rendezvous said when it ended; None: it goes on."""
        me, workers = generation.worker, generation.workers
        self._all = set(range(workers)) - {me}
        # Worker 0 looks at all, the others at it and at one more, so that the traffic grows with
        # the workers and not with their square.
        self._watched = self._all if me == 0 else {0, (me + 1) % workers} - {me}
        self._rendezvous = rendezvous
        self._prefix = f"sign/{generation.number}"
        self._sign = sign
        self._limits = limits
        self._turns = _Turns()
        self._proposed: Blame | None = None

    @property
    def rounds(self) -> int:
        """Exchanges that are complete."""
        return self._turns.done

    def run(self) -> None:
        """Beat, until the end or the loss of the rendezvous."""
        try:
            self._rendezvous.first(self._key("cause"), _NONE)
            began_s = time.monotonic()
            while self._turns.begin(self._limits.beat_s):
                now_s = time.monotonic()
                # A thread that did not run could not hear: that time is not the others' silence.
                self._exchange(min(now_s - began_s, 2 * self._limits.beat_s))
                began_s = now_s
                self._turns.complete()
        except RendezvousLost as error:
            self.lost = str(error)
        finally:
            self._turns.end()

    def watch_all(self) -> None:
        """Look at all workers from now on: something is wrong, or over."""
        self._watched = self._all

    def request(self) -> int:
        """Have an exchange begin now; return the number of rounds after which it is complete."""
        return self._turns.request()

    def settle(self, limit_s: float) -> bool:
        """Wait until an exchange that begins now is complete; False: it is not, after so long."""
        return self.is_alive() and self._turns.wait(self._turns.request(), limit_s)

    def propose(self, blame: Blame) -> None:
        """Say who is to blame; if another was faster, its word counts."""
        self._proposed = self._proposed or blame

    def end(self) -> None:
        """Beat no more."""
        self._turns.end()
        if self.is_alive():
            self.join(2 * self._limits.beat_s)
        if self.is_alive():  # it waits for a host that does not answer
            self._rendezvous.cut()
            self.join(2 * self._limits.beat_s)

    def _exchange(self, passed_s: float) -> None:
        rendezvous, mine = self._rendezvous, self._sign()
        cause_key, proposed = self._key("cause"), self._proposed
        rendezvous.set(self._key(mine.worker), mine.to_json())
        if proposed is not None and self.heard.cause is None:
            # Two keys: the first word is kept by one, and the other can be read at any time.
            said = rendezvous.first(self._key("first cause"), proposed.to_json())
            rendezvous.set(cause_key, said)
        keys = {self._key(worker): worker for worker in self._watched}
        texts = rendezvous.get([cause_key, *keys])
        cause = texts.pop(cause_key, _NONE)
        signs = {keys[key]: Sign.from_json(text) for key, text in texts.items()}
        found = None if cause == _NONE else Blame.from_json(cause)
        absent = self._watched - signs.keys()
        self.heard = self.heard.hear(signs, found, passed_s, absent)

    def _key(self, name: object) -> str:
        return f"{self._prefix}/{name}"


class _Turns:
    """Counts exchanges that one thread makes, and that others ask for."""

    def __init__(self) -> None:
        self.done = 0
        self._begun = 0
        self._wanted = 0
        self._over = False
        self._changed = threading.Condition()

    def begin(self, beat_s: float) -> bool:
        """Wait for the next beat, or until somebody asks for it; False: there is none."""
        with self._changed:
            if self._begun:
                self._changed.wait_for(lambda: self._over or self._wanted > self._begun, beat_s)
            self._begun += 1
            return not self._over

    def complete(self) -> None:
        with self._changed:
            self.done = self._begun
            self._changed.notify_all()

    def request(self) -> int:
        with self._changed:
            self._wanted = self._begun + 1
            self._changed.notify_all()
            return self._wanted

    def wait(self, turn: int, limit_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._over or self.done >= turn, limit_s)
            return self.done >= turn

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()
