"""The smallest adapter: a linear model in NumPy, whose workers are threads.

Whoever writes an adapter starts here. All that a framework must bring is in this file: a model and
its gradient, how gradients are summed, and when the loop gets where. The rest is `poise.runtime`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from poise.core.order import Order
from poise.runtime.batches import MapBatches
from poise.runtime.clocks import HostClock
from poise.runtime.events import BucketDone, BucketReady, Events
from poise.runtime.generation import Generation, Member
from poise.runtime.memory import Guard, HostMemory
from poise.runtime.meter import Meter
from poise.runtime.orders import KeyedOrders
from poise.runtime.recording import Recording
from poise.runtime.saved import load_state, saved_state
from poise.runtime.session import Equipment, Session
from poise.runtime.settings import Settings, checked_policy
from poise.runtime.threads import ThreadGroup, ThreadRendezvous

Floats = NDArray[np.float64]


@dataclass
class Linear:
    """y = x w, trained by gradient descent with momentum on the mean squared error."""

    weights: Floats
    gradient: Floats | None = None
    velocity: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.velocity = np.zeros_like(self.weights)

    def backward(self, x: Floats, y: Floats) -> None:
        """Compute the gradient of the mean loss; NaN without a sample, as frameworks do."""
        with np.errstate(invalid="ignore"):
            self.gradient = 2 * x.T @ (x @ self.weights - y) / np.float64(len(x))

    def step(self, rate: float = 0.05, momentum: float = 0.9) -> None:
        """Use the gradient."""
        assert self.gradient is not None
        self.velocity = momentum * self.velocity + self.gradient
        self.weights = self.weights - rate * self.velocity
        self.gradient = None


class NumpyTraining:
    """A synchronous training of a linear model, on one worker."""

    def __init__(
        self,
        settings: Settings,
        generation: Generation,
        rendezvous: ThreadRendezvous,
        model: Linear,
        data: tuple[Floats, Floats],
        *,
        lead: int = 0,
        name: str = "",
    ) -> None:
        self.session = Session(settings, generation, rendezvous, Events())
        self._model = model
        self._data = data
        self._lead = lead
        self._buckets = 0
        if settings.record is not None and generation.worker == 0:
            Recording(settings.record, self.session.engine).listen(self.session.events)
        sharers = self.session.peers.introduce(Member(name, "numpy", "here"))
        clock = HostClock()
        self.session.equip(
            Equipment(
                clock=clock,
                meter=Meter(clock, Guard(HostMemory(sharers)), loads_itself=True),
                lead=lead,
                usable=lambda: model.gradient is not None,
            )
        )
        self.orders = KeyedOrders(Order(length=len(data[0]), seed=settings.seed))

    def batches(self) -> Iterator[tuple[Floats, Floats, list[int]]]:
        """Yield this worker's share of each global batch, and which samples it is."""
        source = MapBatches(self.session, self.orders, drop_last=False)
        for cut in ahead(source.begin(), self._lead):
            with source.loading():
                samples = [] if cut.emptied else cut.samples
                x, y = (part[samples] for part in self._data)
            source.hand_out(cut.batch, (x, y))
            yield x, y, samples
        source.end()

    def backward(self, x: Floats, y: Floats) -> None:
        """Compute this worker's gradient, and sum it over the workers: scale, sum, tell."""
        self._model.backward(x, y)
        session, gradient = self.session, self._model.gradient
        assert gradient is not None
        batch = session.reducing()
        weights = session.peers.counts.weights()
        self._buckets += 1
        ready = session.stopwatch.stamp()
        session.events.tell(BucketReady(batch.step, ready, self._buckets, None, first=True))
        weight = weights[session.generation.worker]
        part = weight * gradient if weight else np.zeros_like(gradient)
        with session.peers.liveness.watch(f"the reduction of step {batch.step}"):
            session.generation.gradients.sum(part).wait()
        done = session.stopwatch.stamp()
        session.events.tell(BucketDone(batch.step, done, self._buckets, part))
        self._model.gradient = part
        session.reduced(batch.step, done, weights)

    def step(self) -> None:
        """Use the gradient of the global batch."""
        self._model.step()
        self.session.applied(None)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the training, and what was learned."""
        return saved_state(self.session, self.orders, None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        load_state(state, self.session, self.orders, None)


@dataclass
class Team:
    """Threads that train together, and what they meet through."""

    workers: int
    number: int = 0
    control: ThreadGroup = field(init=False)
    sums: ThreadGroup = field(init=False)

    def __post_init__(self) -> None:
        self.sums = ThreadGroup(self.workers)
        self.control = ThreadGroup(self.workers, self.sums)

    def generation(self, worker: int) -> Generation:
        """Return what one of them knows."""
        control, sums = self.control.collectives(worker), self.sums.collectives(worker)
        return Generation(control, sums, self.number)

    def cut(self, why: str) -> None:
        """End all that waits, as the end of a process ends its connections."""
        self.control.cut(why)


def settings_of(global_batch: int, policy: Any, count: Any = None) -> Settings:
    """Return the settings of a training."""
    return Settings(global_batch=global_batch, policy=checked_policy(policy), count=count)


def ahead(items: Iterator[Any], lead: int) -> Iterator[Any]:
    """Take items so many ahead of those that are yielded, as a loader with processes does."""
    waiting: list[Any] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > lead:
            yield waiting.pop(0)
    yield from waiting


def on_threads(team: Team, work: Callable[[int], Any]) -> list[Any]:
    """Run a function on every worker; return what each returned, or the exception it raised."""
    found: list[Any] = [None] * team.workers

    def run(worker: int) -> None:
        try:
            found[worker] = work(worker)
        except BaseException as error:
            found[worker] = error
            team.cut(f"worker {worker} is gone")

    threads = [threading.Thread(target=run, args=(each,)) for each in range(team.workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def checked(found: Sequence[Any]) -> list[Any]:
    """Return what threads returned, or raise what one of them raised."""
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return list(found)
