"""The gradient of the global batch: each worker's part, weighted and summed.

The weights are those of `poise.core.weight`: c_i / C, and no further division.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future, collect_all
from torch.nn.modules.batchnorm import _NormBase

from poise.core.batch import Batch
from poise.core.weight import averaged
from poise.errors import Disagreement, InvalidSetting
from poise.torch.run import Run, Tally


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


class Reduction:
    """The communication hook of DistributedDataParallel.

    DDP calls `hook` for each bucket of gradients during backward, in the same order on every
    worker; so do micro-batches, after their last part. An exception that leaves it reaches the
    user from `loss.backward()`.
    """

    def __init__(
        self, run: Run, model: torch.nn.Module, tally: Tally, inner: InnerHook | None
    ) -> None:
        self._run = run
        self._tally = tally
        self._inner = inner
        self._statistics = RunningStatistics(model)
        self._layout: type | None = None
        """Where the buckets of a hook with a state come from."""
        self._backward = _Backward(step=0, weights=(1.0,), worker=0)

    def hook(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """Weight one bucket by this batch's own counts, and sum it over the workers."""
        first = bucket.index() == 0
        meter = self._run.meter
        timed = None if meter is None else meter.ready(first=first)
        if first:
            self._backward = self._begin(bucket.buffer().device)
        norms = self._run.norms
        if norms is not None:
            norms.bucket(bucket, self._run.counts.own)
        summed = self._launch_bucket(bucket)
        if norms is not None:
            summed = norms.watched(summed)
        if meter is not None and timed is not None:
            self._backward.sums[-1].add_done_callback(lambda _: meter.done(timed))
        if not bucket.is_last():
            return self._when_all_are_summed(summed)
        statistics = self._statistics.read()
        for part in statistics:
            self._launch(part)

        def finish() -> Tensor:
            self._statistics.write(statistics)
            self._run.reduced()
            return summed()

        future = self._when_all_are_summed(finish)
        collect_all(self._backward.sums).add_done_callback(partial(self._look, self._backward))
        return future

    def wait(self, future: Future[Tensor]) -> Tensor:
        """Return the sum that a call of `hook` promised; an error keeps its type."""
        error = None if self._run.cluster.on_accelerator else self._backward.outcome.wait()
        if error is not None:
            raise error
        return future.wait()

    def _begin(self, device: torch.device) -> "_Backward":
        """Find the batch that this backward belongs to."""
        batch = self._run.progress.batch_to_reduce()
        self._run.liveness.reductions += 1
        self._tally.reduced += 1
        if not self._run.compared:
            self._compare_places(batch, device)
            self._run.compared = True
        return _Backward(batch.step, self._run.counts.weights(), self._run.cluster.worker)

    def _launch_bucket(self, bucket: GradBucket) -> Callable[[], Tensor]:
        """Start the sum of a bucket; return what reads it when it is done."""
        gradient: Tensor = bucket.buffer()
        if self._inner is None:
            self._launch(gradient)
            return lambda: gradient
        backward = self._backward
        scaling = averaged(backward.weights, backward.worker)
        if self._inner.state is not None:
            self._check_layout(bucket)
        _scale(gradient, scaling.before)
        group = self._run.cluster.gradients
        state = group if self._inner.state is None else self._inner.state
        try:
            future = self._inner.call(state, bucket)
        except RuntimeError as error:
            self._run.liveness.raise_if_lost(backward.doing, error)
            raise
        if self._inner.state is not None:
            # Such hooks (PowerSGD) post further sums when the first is done, which must not
            # cross with those of the next bucket.
            with self._run.liveness.watch(backward.doing):
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

    def _launch(self, part: Tensor) -> None:
        """Weight in place and start the sum."""
        backward = self._backward
        _scale(part, backward.weight)
        try:
            # The group's own call: torch.distributed.all_reduce takes half as much time again.
            work = self._run.cluster.gradients.allreduce([part])
        except RuntimeError as error:
            raise self._run.liveness.lost(backward.doing, error) from error
        backward.sums.append(work.get_future())

    def _when_all_are_summed(self, finish: Callable[[], Tensor]) -> Future[Tensor]:
        """Return a future of finish(), or of an error that names the worker that is lost."""
        if self._run.cluster.on_accelerator:
            return self._backward.sums[-1].then(lambda _: finish())
        return self._backward.outcome.then(partial(_result, finish))

    def _look(self, backward: "_Backward", all_sums: Future[list[Future[Any]]]) -> None:
        """Pass an error on; a failed sum reaches a callback of this kind, but never `then`."""
        try:
            for each in all_sums.value():
                each.value()
        except RuntimeError as error:
            backward.outcome.set_result(self._run.liveness.lost(backward.doing, error))
        else:
            backward.outcome.set_result(None)

    def _compare_places(self, batch: Batch, device: torch.device) -> None:
        """Raise unless all workers are at the same place; once in each pass over the loader."""
        names = ("epoch", "position", "step")
        place = torch.tensor([batch.epoch, batch.start, batch.step], device=device)
        extremes = torch.cat([place, -place])
        with self._run.liveness.watch(f"the reduction of step {batch.step}"):
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._run.cluster.gradients)
        largest, smallest = extremes.view(2, -1).tolist()
        for name, high, low in zip(names, largest, smallest, strict=True):
            if high != -low:
                raise Disagreement(
                    f"workers are at different places: {name} {-low} on one, {high} on another; "
                    "load the same state on every worker and let all take the same steps"
                )


@dataclass
class _Backward:
    """One backward under way."""

    step: int
    weights: tuple[float, ...]
    """Every worker's factor in the gradient."""
    worker: int
    sums: list[Future[Any]] = field(default_factory=list)
    """The sums started so far."""
    outcome: Future[Exception | None] = field(default_factory=Future)
    """Set when all sums are done: to nothing, or to what went wrong."""

    @property
    def weight(self) -> float:
        """This worker's factor in the gradient."""
        return self.weights[self.worker]

    @property
    def doing(self) -> str:
        """What a worker that fails now keeps the others from."""
        return f"the reduction of step {self.step}"


class RunningStatistics:
    """The running mean and variance of normalization layers, merged by share in every step.

    Each worker normalizes with its own local batch; merged, their running statistics are equal
    everywhere, so that any worker's state_dict is the model's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._layers = [layer for layer in model.modules() if isinstance(layer, _NormBase)]

    def read(self) -> list[Tensor]:
        """Return the statistics of the layers in training mode as one tensor, or nothing."""
        tensors = self._tensors()
        if not tensors:
            return []
        wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
        return [torch.cat([tensor.reshape(-1).to(wide) for tensor in tensors])]

    def write(self, merged: list[Tensor]) -> None:
        """Take merged statistics over."""
        tensors = self._tensors()
        for whole in merged:
            parts = torch.split(whole, [tensor.numel() for tensor in tensors])
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def _tensors(self) -> list[Tensor]:
        candidates = (
            statistic
            for layer in self._layers
            if layer.training
            for statistic in (layer.running_mean, layer.running_var)
        )
        return [statistic for statistic in candidates if statistic is not None]


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
