"""What travels between a worker and its server: gradients out, weights and local batches in."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from poise.errors import Disagreement
from poise.runtime.channel import GONE
from poise.torch.asynchronous.joining import Joining
from poise.torch.asynchronous.link import server_needed
from poise.torch.asynchronous.messages import Begin, Handed, Leave, NoMore, Push, Weights
from poise.torch.asynchronous.replica import Replica


class Courier:
    """Carries pushes to the server, one at a time; with `ahead`, while the worker computes."""

    def __init__(self, joining: Joining, replica: Replica, waited: Callable[[float], None]) -> None:
        self._link = joining.link
        self._address = joining.address
        self._replica = replica
        self._waited = waited
        """Is told the seconds of each wait."""
        self._thread = ThreadPoolExecutor(1, "poise-exchange") if joining.ahead else None
        self._traveling: Future[Weights] | None = None
        self._arrived: Weights | None = None
        """Weights that are here and not yet taken over."""
        self._shares: deque[Handed] = deque()
        """Handed to this worker, and not yet fetched."""

    def ask(self, asked: Begin) -> Weights | NoMore:
        """Ask for local batches; those that were handed before are forgotten."""
        self._shares.clear()
        with server_needed(self._address, "asking for samples"):
            self._link.say(asked)
            answer = self._link.answer()
            if isinstance(answer, Weights):
                self._link.receive(self._replica.weights.bytes)
        if isinstance(answer, Weights):
            self._arrived = None
            self._shares.extend(answer.handed)
        elif not isinstance(answer, NoMore):
            raise Disagreement(f"the server answered with {type(answer).__name__}")
        return answer

    def next_share(self) -> Handed | None:
        """Return the next local batch to fetch; None: there is no more for now."""
        if not self._shares:
            self.wait()
        return self._shares.popleft() if self._shares else None

    def carry(self, push: Push, doing: str) -> Weights | None:
        """Carry a push; return new weights, or None if they arrive while the worker computes."""
        if self._thread is not None:
            self._traveling = self._thread.submit(self._exchange, push, doing)
            return None
        answer = self._exchange(push, doing)
        self._waited(answer.queued_s)
        self._shares.extend(answer.handed)
        return answer

    def wait(self) -> None:
        """Wait for what travels while the worker computes, if there is something."""
        if self._traveling is None:
            return
        start_s = time.perf_counter()
        traveling, self._traveling = self._traveling, None
        self._arrived = traveling.result()
        self._shares.extend(self._arrived.handed)
        self._waited(min(time.perf_counter() - start_s, self._arrived.queued_s))

    def arrived(self) -> Weights | None:
        """Return weights that are here and not yet taken over, once."""
        arrived, self._arrived = self._arrived, None
        return arrived

    def leave(self) -> None:
        """Tell the server that this worker leaves."""
        with suppress(*GONE, Disagreement):  # it may have left before
            self.wait()
            self._link.say(Leave())

    def close(self) -> None:
        """End the thread, whose connection is closed."""
        if self._thread is not None:
            self._thread.shutdown()

    def _exchange(self, push: Push, doing: str) -> Weights:
        with server_needed(self._address, doing):
            self._link.say(push)
            self._link.send(self._replica.gradient.bytes)
            answer = self._link.answer()
            if not isinstance(answer, Weights):
                raise Disagreement(f"the server answered a push with {type(answer).__name__}")
            self._link.receive(self._replica.weights.bytes)
        return answer
