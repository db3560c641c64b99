"""The weights on the server: updated push by push, copied for workers, in shards.

Each shard has a lock and a version. A worker's copy is made shard by shard, so no shard is ever
read half updated, and pushes to different shards run at the same time. How stale a push is, is
known when a shard is its to update; the staleness of the whole is the largest over the shards.

Learning rates change under the lock of the first shard, before an update, and are read under it:
the optimizer of a single shard is the user's own, whose rate is another one while it steps.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poise.core.staleness import lowered_momentum, usual_staleness
from poise.engine.modes import Async, Stale
from poise.torch.asynchronous.flat import Flat
from poise.torch.torch_private import NormBase, mark_stepped, optimizer_of

SHARD_BYTES = 8 * 1024**2
"""A shard has at least so many bytes: smaller ones cost more than they save."""
_ADJUSTED = ("lr", "momentum", "betas")
"""Settings of an optimizer that are others while it applies a push."""
Versions = tuple[int, ...]


def trained_parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """Return what an optimizer trains, in its order."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]


def statistics(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return the running statistics of normalization layers, which training changes too."""
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, NormBase)]
    found = {
        id(tensor): tensor
        for layer in layers
        for tensor in (layer.running_mean, layer.running_var, layer.num_batches_tracked)
        if tensor is not None
    }
    return list(found.values())


def everything(models: Sequence[nn.Module]) -> list[Tensor]:
    """Return all parameters and buffers."""
    return [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]


def momentum_notice(mode: Async | Stale, optimizer: Optimizer, workers: int) -> str:
    """Say that explicit momentum is lowered, before anybody wonders; "" if it is not."""
    group = optimizer.param_groups[0]
    stated = group.get("momentum") or (group.get("betas") or (0.0,))[0]
    if isinstance(mode, Stale) or not isinstance(stated, float) or not stated:
        return ""
    late = usual_staleness(workers, ahead=mode.ahead)
    if not late:
        return ""
    return (
        f"updates that are {late} late, those of {workers} workers that do not wait for each "
        f"other, act like momentum, so that of the optimizer is "
        f"{lowered_momentum(stated, late):.2g} instead of {stated:g}"
    )


class Parameters:
    """What the server's optimizer trains."""

    def __init__(self, models: Sequence[nn.Module], optimizer: Optimizer, most_shards: int) -> None:
        self.trained = trained_parameters(optimizer)
        self.statistics = statistics(models)
        self.optimizer = optimizer
        self.before_update: list[Callable[[], None]] = []
        """What is called before each update; it may change the learning rates."""
        parts = _parts(self.trained, most_shards if _divides(optimizer) else 1)
        self._shards = [
            _Shard(first, part, optimizer if len(parts) == 1 else optimizer_of(optimizer, part))
            for first, part in parts
        ]
        self._merging = threading.Lock()

    @property
    def busy_s(self) -> float:
        """Seconds in which gradients were applied or weights copied, the sum over the shards."""
        return sum(shard.busy_s for shard in self._shards)

    @property
    def versions(self) -> Versions:
        """How often each shard was updated."""
        return tuple(shard.version for shard in self._shards)

    def buffer(self) -> Flat:
        """Return room for one copy of everything that changes, or for its gradient."""
        return Flat([*self.trained, *self.statistics])

    def staleness(self, versions: Versions) -> int:
        """Return how many updates came after a copy with these versions."""
        return max(now - then for now, then in zip(self.versions, versions, strict=True))

    def copy(self, into: Flat) -> tuple[Versions, tuple[float, ...], float]:
        """Copy the weights.

        Returns their versions, the learning rates of then by group, and the seconds of waiting
        until all shards had been free.
        """
        waited_s, versions = 0.0, []
        rates: tuple[float, ...] = ()
        for shard in self._shards:
            with shard.held() as queued_s:
                into.read(shard.parameters, shard.first)
                versions.append(shard.version)
                rates = rates or tuple(float(group["lr"]) for group in self.optimizer.param_groups)
            waited_s += queued_s
        with self._merging:
            into.read(self.statistics, len(self.trained))
        return tuple(versions), rates, waited_s

    def apply(
        self,
        gradient: Flat,
        present: Sequence[bool],
        *,
        since: Versions,
        factor: Callable[[int], float],
        late: float,
        part: float,
    ) -> tuple[int, float]:
        """Update the weights once.

        Args:
            gradient: of the trained parameters, then statistics.
            present: which of the parameters have a gradient.
            since: versions of the copy that it was computed with.
            factor: what the learning rate is multiplied by, at a staleness.
            late: the staleness of gradients on average, which acts like momentum.
            part: how much the statistics count.

        Returns the updates since that copy, the most over the shards, and the seconds of waiting.
        """
        waited_s, staleness = 0.0, 0
        for number, (shard, then) in enumerate(zip(self._shards, since, strict=True)):
            with shard.held() as queued_s:
                for call in self.before_update if number == 0 else ():
                    call()
                stale = shard.version - then
                span = slice(shard.first, shard.first + len(shard.parameters))
                for parameter, view, there in zip(
                    shard.parameters, gradient.views[span], present[span], strict=True
                ):
                    parameter.grad = view.to(parameter.device) if there else None
                with _adjusted(shard.stepper, self.optimizer, factor(stale), late):
                    shard.stepper.step()
                for parameter in shard.parameters:
                    parameter.grad = None
                shard.version += 1
            waited_s += queued_s
            staleness = max(staleness, stale)
        self._merge(gradient.views[len(self.trained) :], part)
        mark_stepped(self.optimizer)
        return staleness, waited_s

    def follow(self) -> None:
        """Let the learning rates follow, as before an update."""
        with self._shards[0].held():
            for call in self.before_update:
                call()

    @torch.no_grad()
    def _merge(self, seen: Sequence[Tensor], part: float) -> None:
        """Move the running statistics towards a worker's, by its share."""
        with self._merging:
            for ours, theirs in zip(self.statistics, seen, strict=True):
                if ours.is_floating_point():
                    ours.lerp_(theirs.to(ours.device), part)
                else:  # the number of batches seen
                    ours.copy_(torch.maximum(ours, theirs.to(ours.device)))


@dataclass(eq=False)
class _Shard:
    """Some of the parameters."""

    first: int
    parameters: Sequence[nn.Parameter]
    stepper: Optimizer
    version: int = 0
    busy_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def held(self) -> Iterator[float]:
        """Hold the lock; gives the seconds that it took to get it."""
        start_s = time.perf_counter()
        with self._lock:
            held_s = time.perf_counter()
            yield held_s - start_s
            self.busy_s += time.perf_counter() - held_s


def _parts(
    parameters: Sequence[nn.Parameter], most: int
) -> list[tuple[int, Sequence[nn.Parameter]]]:
    """Cut parameters into neighbors of about the same size; return their places, too."""
    sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
    count = max(1, min(most, sum(sizes) // SHARD_BYTES, len(parameters)))
    parts: list[tuple[int, Sequence[nn.Parameter]]] = []
    target, first, size = sum(sizes) / count, 0, 0
    for place, own in enumerate(sizes, start=1):
        size += own
        last = place == len(sizes)
        if last or (size >= target and len(parts) < count - 1):
            parts.append((first, parameters[first:place]))
            first, size = place, 0
    return parts


def _divides(optimizer: Optimizer) -> bool:
    """Whether an optimizer updates each parameter by itself, as far as is known."""
    ours = type(optimizer).__module__.startswith("torch.optim.")
    return ours and not isinstance(optimizer, torch.optim.LBFGS)


@contextmanager
def _adjusted(
    stepper: Optimizer, users: Optimizer, factor: float, staleness: float
) -> Iterator[None]:
    """Let an optimizer step with the user's settings of now, adjusted; then they are back."""
    stepper.state = users.state  # which is another one after load_state_dict
    kept = [
        {key: group[key] for key in _ADJUSTED if key in group} for group in stepper.param_groups
    ]
    for group, stated in zip(stepper.param_groups, users.param_groups, strict=True):
        group.update({key: value for key, value in stated.items() if key != "params"})
        if factor != 1:
            group["lr"] = stated["lr"] * factor
        if stated.get("momentum"):
            group["momentum"] = lowered_momentum(stated["momentum"], staleness)
        if stated.get("betas"):
            first, *rest = stated["betas"]
            group["betas"] = (lowered_momentum(first, staleness), *rest)
    try:
        yield
    finally:
        for group, before in zip(stepper.param_groups, kept, strict=True):
            group.update(before)
