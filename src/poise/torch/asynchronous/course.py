"""The course of a training on its server: what the threads of all workers share.

One lock guards it; whoever changes it tells all who wait. The weights are not part of it: gradients
are applied and weights copied under the locks of their shards.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from poise.core.order import DrawnOrder, Order
from poise.engine.asp import AsyncEngine
from poise.errors import WorkerLost
from poise.runtime.channel import Channel
from poise.torch.asynchronous.messages import NoMore

_LOOK_S = 0.2
"""How often who waits looks whether the other end is still there."""
_log = logging.getLogger("poise")

Ending = NoMore | str
"""What workers are told that ask for more: that it is done, or what went wrong."""


class Failed(Exception):
    """The server's optimizer or schedule raised; the cause says what."""


class Course:
    """Where the training is, and whether it goes on."""

    engine: AsyncEngine
    """Frozen, so that anyone may read it at any time; replaced inside of `changing` only. There is
    none until the script prepares its training and `resume` is called."""

    def __init__(self) -> None:
        self.order: Order | DrawnOrder | None = None
        """Of this epoch's samples, if it is not one that workers can compute themselves."""
        self.is_open = False
        """Whether samples are handed out."""
        self.ended: Ending | None = None
        self.broken = False
        """Whether an update failed, perhaps half-way, so that the weights are not to be kept."""
        self.paused = False
        """Whether updates wait until those under way are made."""
        self._updating = 0
        """Updates under way."""
        self._begun = False
        """Whether a pass has begun."""
        self._failure: BaseException | None = None
        self._news = threading.Condition()

    @property
    def global_batch(self) -> int:
        """Samples of all workers' local batches together."""
        return self.engine.engine.global_batch

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the lock, and tell all who wait afterwards."""
        with self._news:
            try:
                yield
            finally:
                self._news.notify_all()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Make an update that is outside of the lock; what is to stand still waits for its end."""
        with self._news:
            self._news.wait_for(lambda: not self.paused)
            self._updating += 1
        try:
            yield
        finally:
            with self.changing():
                self._updating -= 1

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Tell an error of the user's optimizer or schedule from the end of a connection."""
        try:
            yield
        except Exception as error:
            self.broken = True
            raise Failed from error

    @contextmanager
    def still(self) -> Iterator[None]:
        """Have no update made, so that weights and place fit each other."""
        with self.changing():
            before, self.paused = self.paused, True
            self._news.wait_for(lambda: not self._updating)
            try:
                yield
            finally:
                self.paused = before

    def look_after(self, channel: Channel) -> None:
        """Wait a little for news, inside of `changing`, for a worker.

        Raises EOFError if the server has ended, or the worker is gone meanwhile.
        """
        if self.ended is not None:
            raise EOFError("the server has ended")
        self._news.wait(_LOOK_S)
        if channel.ended():
            raise EOFError("the connection is closed")

    def await_first_pass(self, channel: Channel) -> None:
        """Wait until samples are handed out for the first time."""
        with self._news:
            while not self._begun:
                self.look_after(channel)

    def resume(self, engine: AsyncEngine) -> None:
        """Go on from a place: the first, or another."""
        with self.changing():
            self.engine = engine

    def open(self, order: Order | DrawnOrder | None) -> None:
        """Hand out the samples of the epoch, in an order that workers cannot compute or None."""
        with self.changing():
            self.order = order
            self.is_open = self._begun = True

    def next_epoch(self, after: int) -> None:
        """Turn to the epoch after another one, unless that has happened or all workers are done."""
        with self.changing():
            if self.engine.epoch == after and not self.engine.finished:
                self.engine = self.engine.next_epoch()

    def goes_on(self, *, closed: bool) -> bool:
        """Wait a little for news; False: the epoch is over, and the next one comes.

        Raises what failed in the thread of a worker; if closed, also if all workers are lost.
        """
        with self._news:
            if self._failure is None and not self.engine.over:
                if closed and self.engine.abandoned:
                    raise WorkerLost(
                        "all workers are lost, and a closed server waits for no others; start it "
                        "again, from its last save, or leave --closed out so that others can join"
                    )
                self._news.wait(_LOOK_S)
                return True
            self.is_open = False
            if self._failure is not None:
                raise self._failure
            if self.engine.finished:
                _log.warning("all workers were done and have left, so training ends here")
            self.next_epoch(self.engine.epoch)
            return False

    def fail(self, failure: BaseException) -> None:
        """Have the pass over the loader raise what a worker's thread could not bear."""
        with self.changing():
            self._failure = self._failure or failure

    def end(self, said: Ending) -> None:
        """Hand out nothing more."""
        with self.changing():
            self.ended, self.is_open = said, False

    def await_leaves(self, patience_s: float) -> None:
        """Give the workers so many seconds to hear of the end and leave."""
        with self._news:
            self._news.wait_for(lambda: not self.engine.members, patience_s)
