"""The gradient of the global batch: each worker's part, weighted and summed.

    g = sum_i (c_i / C) g_i

with g_i worker i's mean gradient, c_i its count and C the global count. No further division.
"""

from collections.abc import Callable
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
    worker. An exception that leaves it reaches the user as RuntimeError with its message.
    """

    def __init__(self, run: Run, model: torch.nn.Module) -> None:
        self._run = run
        self._statistics = RunningStatistics(model)
        self._batch: Batch | None = None

    def hook(self, state: None, bucket: GradBucket) -> Future[Tensor]:
        """Weight one bucket by this batch's own split, and sum it over the workers."""
        gradient: Tensor = bucket.buffer()
        if bucket.index() == 0:
            self._batch = self._begin(gradient.device)
        batch = self._batch
        assert batch is not None
        parts = [gradient]
        if bucket.is_last():
            parts += self._statistics.read()
        doing = f"the reduction of step {batch.step}"
        weight = batch.weight(self._run.cluster.worker)
        with self._run.liveness.watch(doing):
            sums = [self._sum(_weighted(part, weight)) for part in parts]

        def summed() -> Tensor:
            if bucket.is_last():
                self._statistics.write(parts[1:])
                self._run.progress = self._run.progress.reduced()
            return gradient

        return self._when_done(sums, summed, doing)

    def _begin(self, device: torch.device) -> Batch:
        """Return the batch that this backward belongs to."""
        batch = self._run.progress.batch_to_reduce()
        self._run.liveness.note(reductions=self._run.liveness.sign.reductions + 1)
        if not self._run.compared:
            self._compare_places(batch, device)
            self._run.compared = True
        return batch

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

    def _sum(self, part: Tensor) -> Future[list[Tensor]]:
        work = dist.all_reduce(part, group=self._run.cluster.gradients, async_op=True)
        assert work is not None
        future: Future[list[Tensor]] = work.get_future()
        return future

    def _when_done(
        self, sums: list[Future[list[Tensor]]], summed: Callable[[], Tensor], doing: str
    ) -> Future[Tensor]:
        """Return a future of summed(), or of an error that names the worker that is lost."""
        if self._run.cluster.on_accelerator:
            return collect_all(sums).then(lambda _: summed())
        outcome: Future[Exception | None] = Future()
        both = sums[0] if len(sums) == 1 else collect_all(sums)
        both.add_done_callback(partial(self._look, sums, outcome, doing))
        return outcome.then(partial(_result, summed))

    def _look(
        self,
        sums: list[Future[list[Tensor]]],
        outcome: Future[Exception | None],
        doing: str,
        _: object,
    ) -> None:
        """Pass an error on; a failed sum reaches a callback of this kind, but never `then`."""
        try:
            for each in sums:
                each.value()
        except RuntimeError as error:
            outcome.set_result(self._run.liveness.lost(doing, error))
        else:
            outcome.set_result(None)


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


def _result(summed: Callable[[], Tensor], outcome: Future[Exception | None]) -> Tensor:
    error = outcome.value()
    if error is not None:
        raise error
    return summed()


def _weighted(part: Tensor, weight: float) -> Tensor:
    """Scale in place; weight 0 overwrites, since 0 times NaN would poison every worker."""
    return part.zero_() if weight == 0 else part.mul_(weight)
