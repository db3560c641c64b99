"""The gradient of the global batch: each worker's part, weighted and summed.

The weights are those of `poise.core.weight`: c_i / C, and no further division.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future, collect_all

from poise.core.weight import averaged
from poise.errors import InvalidSetting, WorkerLost
from poise.runtime.clocks import Stamp, Stopwatch
from poise.runtime.events import BucketDone, BucketReady, HandedOut
from poise.runtime.session import Session
from poise.torch.backwards import Tally
from poise.torch.gloo import disconnecting, disconnection
from poise.torch.own_part import OwnPart
from poise.torch.places import Places
from poise.torch.running_statistics import RunningStatistics


@dataclass(frozen=True)
class InnerHook:
    """A communication hook of the user's, such as fp16 compression, which averages."""

    call: Callable[[Any, GradBucket], Future[Tensor]]
    state: Any

    @staticmethod
    def of(hook: Any) -> "InnerHook | None":
        """Read Balancer's `comm_hook`: a hook, or (state, hook)."""
        match hook:
            case None:
                return None
            case (state, call):
                pass
            case call:
                state = None
        if not callable(call):
            raise InvalidSetting(
                f"comm_hook={hook!r} is not a communication hook; give a function of "
                "(state, bucket), or (state, function)"
            )
        return InnerHook(call, state)


_numbers = count()
"""Tells the buckets of all trainings in this process apart."""


class GradientSum:
    """Sums one model's gradients over the workers of a generation: scale before, sum, tell.

    DDP calls `hook` for each bucket of gradients during backward, in the same order on every
    worker; so do micro-batches, after their last part. The sum is over the generation's group,
    whichever group DDP itself was made with. An exception that leaves the hook reaches the user
    from `loss.backward()`.
    """

    def __init__(
        self,
        session: Session,
        model: nn.Module,
        tally: Tally,
        *,
        places: Places,
        inner: InnerHook | None = None,
    ) -> None:
        self._session = session
        self._tally = tally
        self._places = places
        self._inner = inner
        self._own = OwnPart(session, model)
        self._statistics = RunningStatistics(model)
        self._layout: type | None = None
        """Where the buckets of a hook with a state come from."""
        self._backward = _Backward(0, (1.0,), 0, session.stopwatch, on_cpu=True)
        session.events.on(HandedOut, lambda _: tally.clear())

    def hook(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """Weight one bucket by this batch's own counts, and sum it over the workers."""
        session, first = self._session, bucket.index() == 0
        ready = session.stopwatch.stamp() if session.events.heard(BucketReady) else None
        if first:
            self._backward = self._begin(bucket.buffer().device)
        backward = self._backward
        if ready is None:
            summed = self._launch_bucket(bucket)
        else:
            number = next(_numbers)
            session.events.tell(BucketReady(backward.step, ready, number, bucket, first))
            summed = partial(self._told, backward, number, self._launch_bucket(bucket))
            backward.sums[-1].add_done_callback(partial(backward.arrive, number))
        if not bucket.is_last():
            return backward.when_all_are_summed(summed)
        statistics = self._statistics.read()
        for part in statistics:
            self._launch(part)

        def finish() -> Tensor:
            self._statistics.write(statistics)
            gradient = summed()
            session.reduced(backward.step, backward.last, backward.weights)
            return gradient

        future = backward.when_all_are_summed(finish)
        collect_all(backward.sums).add_done_callback(partial(self._look, backward))
        return future

    def wait(self, future: Future[Tensor]) -> Tensor:
        """Return the sum that a call of `hook` promised; an error keeps its type."""
        error = self._backward.outcome.wait() if self._backward.on_cpu else None
        if error is not None:
            raise error
        return future.wait()

    def _begin(self, device: torch.device) -> "_Backward":
        """Find the batch that this backward belongs to."""
        session = self._session
        batch = session.reducing()
        self._tally.reduced += 1
        if not self._places.compared:
            self._places.compare(batch, device)
        weights = session.peers.counts.weights()
        worker, on_cpu = session.generation.worker, device.type == "cpu"
        return _Backward(batch.step, weights, worker, session.stopwatch, on_cpu)

    def _told(self, backward: "_Backward", number: int, summed: Callable[[], Tensor]) -> Tensor:
        """Return the sum of a bucket, and tell of it."""
        gradient = summed()
        arrived = backward.arrived.get(number) or self._session.stopwatch.stamp()
        self._session.events.tell(BucketDone(backward.step, arrived, number, gradient))
        return gradient

    def _launch_bucket(self, bucket: GradBucket) -> Callable[[], Tensor]:
        """Start the sum of a bucket; return what reads it when it is done."""
        gradient: Tensor = bucket.buffer()
        backward, liveness = self._backward, self._session.peers.liveness
        if self._inner is None:
            self._launch(gradient, bucket)
            return lambda: gradient
        scaling = averaged(backward.weights, backward.worker)
        if self._inner.state is not None:
            self._check_layout(bucket)
        _scale(gradient, scaling.before)
        self._look_at(bucket, gradient)
        group = self._session.generation.gradients
        state = group if self._inner.state is None else self._inner.state
        with liveness.naming(backward.doing), disconnecting():
            future = self._inner.call(state, bucket)
        if self._inner.state is not None:
            # Such hooks (PowerSGD) post further sums when the first is done, which must not
            # cross with those of the next bucket.
            with liveness.watch(backward.doing), disconnecting():
                future.wait()
        backward.sums.append(future)

        def scaled_back() -> Tensor:
            bucket.set_buffer(gradient)  # a hook may have put a buffer of another type there
            return gradient.copy_(future.value()).mul_(scaling.after)

        return scaled_back

    def _check_layout(self, bucket: GradBucket) -> None:
        """Raise if buckets come from elsewhere than before: the hook knows them by number."""
        self._layout = self._layout or type(bucket)
        if type(bucket) is not self._layout:
            raise InvalidSetting(
                "comm_hook has a state, which remembers buckets by their number; micro_batches "
                "and plain backwards have different buckets: use one of them for all batches"
            )

    def _launch(self, part: Tensor, bucket: GradBucket | None = None) -> None:
        """Weight in place and start the sum."""
        backward = self._backward
        _scale(part, backward.weights[backward.worker])
        if bucket is not None:
            self._look_at(bucket, part)
        try:
            # The group's own call: torch.distributed.all_reduce takes half as much time again.
            work = self._session.generation.gradients.allreduce([part])
        except RuntimeError as error:
            raise self._lost(backward, error) from error
        backward.sums.append(work.get_future())

    def _look_at(self, bucket: GradBucket, gradient: Tensor) -> None:
        """See whether this worker's part is finite; not in a first bucket that others follow."""
        backward = self._backward
        if backward.sums or bucket.is_last():
            self._own.look(backward.step, bucket, gradient, on_cpu=backward.on_cpu)

    def _look(self, backward: "_Backward", all_sums: Future[list[Future[Any]]]) -> None:
        """Pass an error on; a failed sum reaches a callback of this kind, but never `then`."""
        try:
            for each in all_sums.value():
                each.value()
        except RuntimeError as error:
            backward.outcome.set_result(self._found_lost(backward, error))
        else:
            backward.outcome.set_result(None)

    def _found_lost(self, backward: "_Backward", error: RuntimeError) -> Exception:
        """Return what is to be raised, whatever the search for the culprit itself raises."""
        try:
            return self._lost(backward, error)
        except Exception as other:
            return other

    def _lost(self, backward: "_Backward", error: RuntimeError) -> WorkerLost:
        return self._session.peers.liveness.lost(backward.doing, disconnection(error))


@dataclass(slots=True)
class _Backward:
    """One backward under way."""

    step: int
    weights: tuple[float, ...]
    """Every worker's factor in the gradient."""
    worker: int
    stopwatch: Stopwatch
    on_cpu: bool
    sums: list[Future[Any]] = field(default_factory=list)
    """The sums started so far."""
    arrived: dict[int, Stamp] = field(default_factory=dict)
    """When the sum of each bucket was there."""
    last: Stamp | None = None
    """The last of these moments."""
    outcome: Future[Exception | None] = field(default_factory=Future)
    """Set when all sums are done: to nothing, or to what went wrong."""

    @property
    def doing(self) -> str:
        """What a worker that fails now keeps the others from."""
        return f"the reduction of step {self.step}"

    def arrive(self, number: int, _: Future[Any]) -> None:
        """The sum of a bucket is there, or failed."""
        self.last = self.arrived[number] = self.stopwatch.stamp()

    def when_all_are_summed(self, finish: Callable[[], Tensor]) -> Future[Tensor]:
        """Return a future of finish(), or of an error that names the worker that is lost."""
        if not self.on_cpu:
            return self.sums[-1].then(lambda _: finish())
        return self.outcome.then(partial(_result, finish))


def _scale(part: Tensor, factor: float) -> None:
    if factor == 0:
        part.zero_()  # 0 times NaN would poison every worker
    else:
        part.mul_(factor)


def _result(finish: Callable[[], Tensor], outcome: Future[Exception | None]) -> Tensor:
    error = outcome.value()
    if error is not None:
        raise error
    return finish()
