"""The gradient of the global batch: each worker's part, weighted and summed.

    g = sum_i (c_i / C) g_i

with g_i worker i's mean gradient, c_i its count and C the global count. No further division.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future, collect_all
from torch.nn.modules.batchnorm import _NormBase

from poise.core.batch import Batch
from poise.errors import Disagreement
from poise.torch.run import Run


class Reduction:
    """The communication hook of DistributedDataParallel.

    DDP calls `hook` for each bucket of gradients during backward, in the same order on every
    worker. An exception that leaves it reaches the user from `loss.backward()`.
    """

    def __init__(self, run: Run, model: torch.nn.Module) -> None:
        self._run = run
        self._statistics = RunningStatistics(model)
        self._backward = _Backward(step=0, weight=0.0)

    def hook(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """Weight one bucket by this batch's own split, and sum it over the workers."""
        gradient: Tensor = bucket.buffer()
        if bucket.index() == 0:
            self._backward = self._begin(gradient.device)
        self._launch(gradient)
        if not bucket.is_last():
            return self._when_all_are_summed(lambda: gradient)
        statistics = self._statistics.read()
        for part in statistics:
            self._launch(part)

        def finish() -> Tensor:
            self._statistics.write(statistics)
            self._run.progress = self._run.progress.reduced()
            return gradient

        future = self._when_all_are_summed(finish)
        collect_all(self._backward.sums).add_done_callback(partial(self._look, self._backward))
        return future

    def _begin(self, device: torch.device) -> "_Backward":
        """Find the batch that this backward belongs to."""
        batch = self._run.progress.batch_to_reduce()
        self._run.liveness.reductions += 1
        self._run.reductions += 1
        backward = _Backward(batch.step, batch.weight(self._run.cluster.worker))
        if not self._run.compared:
            self._compare_places(batch, device)
            self._run.compared = True
        return backward

    def _launch(self, part: Tensor) -> None:
        """Weight in place and start the sum."""
        backward = self._backward
        if backward.weight == 0:
            part.zero_()  # 0 times NaN would poison every worker
        else:
            part.mul_(backward.weight)
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

    def _look(self, backward: "_Backward", all_sums: Future[list[Future[list[Tensor]]]]) -> None:
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
    weight: float
    """This worker's factor in the gradient."""
    sums: list[Future[list[Tensor]]] = field(default_factory=list)
    """The sums started so far."""
    outcome: Future[Exception | None] = field(default_factory=Future)
    """Set when all sums are done: to nothing, or to what went wrong."""

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


def _result(finish: Callable[[], Tensor], outcome: Future[Exception | None]) -> Tensor:
    error = outcome.value()
    if error is not None:
        raise error
    return finish()
