"""A thread that hears what all workers of a lab say."""

import selectors
import socket
from collections.abc import Callable, Sequence
from threading import Thread

from poise.lab.crew import Member


class Listener:
    """Calls back when a worker is prepared, and whenever something happened.

    Args:
        members: the workers.
        prepared: what to do when one of them is prepared for training.
        happened: what to do after every event; returns in how many seconds to do it again at the
            latest, or None to wait for an event.
    """

    def __init__(
        self,
        members: Sequence[Member],
        prepared: Callable[[int], None],
        happened: Callable[[], float | None],
    ) -> None:
        self.ended: list[int] = []
        """Workers that have ended, in this order."""
        self.failure: Exception | None = None
        """What went wrong in the thread, which ends then."""
        self._members = members
        self._prepared = prepared
        self._happened = happened
        self._stop, self._stopped = socket.socketpair()
        self._thread = Thread(target=self._run, name="poise-lab", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stop.close()
        self._thread.join()
        self._stopped.close()

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                self._listen(selector)
        except Exception as error:
            self.failure = error
            for member in self._members:
                member.leave()

    def _listen(self, selector: selectors.BaseSelector) -> None:
        selector.register(self._stopped, selectors.EVENT_READ, None)
        for worker, member in enumerate(self._members):
            selector.register(member.end, selectors.EVENT_READ, worker)
        while True:
            for key, _ in selector.select(self._happened()):
                if key.data is None:
                    return
                there, prepared = self._members[key.data].hear()
                if prepared:
                    self._prepared(key.data)
                if not there:
                    selector.unregister(key.fileobj)
                    self.ended.append(key.data)
