"""Norms of the gradients that are there anyway, for the gradient noise scale.

Each worker takes those of its own gradient, bucket by bucket, before it is weighted; worker 0 also
those of the sum. If a local batch is computed in parts, each part is a group of its own. A worker
that trains alone and in one part compares two steps that follow each other, between which the
weights hardly change.

Not every step is looked at: see `poise.runtime.budget`.
"""

import math
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import GradBucket
from torch.nn.utils import get_total_norm

from poise.core.noise import GroupSums
from poise.core.timing import Floats
from poise.errors import PoiseWarning
from poise.runtime.budget import Budget
from poise.runtime.clocks import Clock
from poise.runtime.events import (
    Applying,
    BucketDone,
    BucketReady,
    Events,
    HandedOut,
    PartComputed,
    Resumed,
)
from poise.runtime.peers import Peers
from poise.runtime.rows import no_norms, norms_row

_KEPT = 16
"""Looks that are kept for their rows to be asked for."""
_NEAR = 8
"""Two steps further apart are not compared: the weights move in between."""
_CLIPPED_FROM = 1.02
"""A gradient is clipped if it was larger by this factor."""
_EXACT = 1e-4


@dataclass
class _Group:
    """One gradient, the mean over its samples, as the norms of its pieces."""

    count: float
    samples: int
    norms: list[Tensor] = field(default_factory=list)


@dataclass
class _Whole:
    """The gradient of the global batch, which worker 0 looks at."""

    awaited: int = 0
    """Buckets whose sum is awaited; on worker 0 alone."""
    size: int = 0
    """Numbers in all buckets."""
    norms: list[Tensor] = field(default_factory=list)
    """Of the buckets of the sum."""
    used: list[Tensor] = field(default_factory=list)
    """Norms of what optimizers got,"""
    used_size: int = 0
    """and how many numbers that were."""


@dataclass
class _Look:
    """One step that is looked at."""

    step: int
    samples: int
    """This worker's."""
    loss_scale: Tensor | None = None
    groups: list[_Group] = field(default_factory=list)
    in_parts: bool = False
    over: bool = False
    """Whether all buckets were handed over."""
    whole: _Whole = field(default_factory=_Whole)
    before: "_Look | None" = None
    """An earlier step, if the two are compared,"""
    products: list[Tensor] = field(default_factory=list)
    """and the products of their buckets."""
    marks: list[tuple[Any, Any]] = field(default_factory=list)
    """Before and after all that looking took."""

    def unscaled(self, norm: float) -> float:
        """Return a norm without the factor on the loss."""
        return norm if self.loss_scale is None else norm / float(self.loss_scale)

    def group_sums(self) -> GroupSums:
        """Return the sums over this worker's groups; without a sample, zeros."""
        sums = GroupSums()
        for group in self.groups:
            sums += GroupSums.of(group.count, group.samples, self.unscaled(_norm(group.norms)) ** 2)
        return sums


class Norms:
    """Looks at the gradients of some steps of one worker."""

    def __init__(self, clock: Clock, device: torch.device, peers: Peers, scaler: Any) -> None:
        """Look at nothing yet.

        Args:
            clock: of the device that computes.
            device: where the gradients are.
            peers: who trains together, and what counts.
            scaler: the GradScaler of the training, or None.
        """
        self._clock = clock
        self._device = device
        self._peers = peers
        self._scaler = scaler
        self._budget = Budget()
        self._looks: deque[_Look] = deque(maxlen=_KEPT)
        self._now: _Look | None = None
        self._awaited: dict[int, _Look] = {}
        """By the numbers of buckets, the looks that wait for their sums."""
        self._first: _Look | None = None
        """On a worker that trains alone, a look that waits for another to be compared with,"""
        self._kept: list[tuple[list[int], Tensor]] = []
        """and its buckets, with what they hold."""
        self._told = False

    def listen(self, events: Events) -> None:
        """Hear of gradients."""
        events.on(Resumed, self._forget)
        events.on(HandedOut, self._begin)
        events.on(PartComputed, self._part)
        events.on(BucketReady, self._bucket)
        events.on(BucketDone, self._summed_bucket)
        events.on(Applying, self._used)

    def row(self, step: int) -> Floats:
        """Return what is known of a step that is over; NaN where it was not looked at."""
        look = next((each for each in self._looks if each.step == step), None)
        if look is None or not self._is_known(look):
            return no_norms()
        self._budget.spend(sum(self._clock.between_s(start, end) for start, end in look.marks))
        found = self._compared(look) if look.products else self._summed(look)
        if found is None or not all(math.isfinite(number) for number in found):
            return no_norms()
        return norms_row(found, self._clipped(look))

    @property
    def _sees_the_sum(self) -> bool:
        return self._peers.generation.worker == 0

    @property
    def _alone(self) -> bool:
        return self._peers.generation.workers == 1

    def _forget(self, _: Resumed) -> None:
        """Training goes on at another place."""
        self._looks.clear()
        self._awaited.clear()
        self._now = self._first = None

    def _begin(self, event: HandedOut) -> None:
        """A batch is handed out; an accumulated gradient says nothing of this one."""
        self._budget.begin(event.stamp.host_s)
        self._now = None
        if not event.fresh:
            return
        first, self._first = self._first, None
        if first is not None and event.step - first.step > _NEAR:
            self._kept.clear()
            first = None
        if first is not None or self._budget.allows(event.step):
            look = self._now = _Look(event.step, event.samples, before=first)
            self._looks.append(look)
            with self._timed(look):
                look.loss_scale = self._loss_scale()

    def _part(self, event: PartComputed) -> None:
        look = self._now
        if look is None:
            return
        look.in_parts = True
        if event.counted:
            with self._timed(look):
                norms = _lengths(event.gradients)
            look.groups.append(_Group(event.counted, event.samples, norms))

    def _bucket(self, event: BucketReady) -> None:
        look, bucket = self._now, event.bucket
        if look is None:
            return
        gradient, first = bucket.buffer(), bucket.index() == 0
        if first and look.whole.size:  # a second backward: the gradients of two losses are added up
            look.over = False
            self._now = None
            return
        look.over = bucket.is_last()
        look.whole.size += gradient.numel()
        if self._sees_the_sum:
            look.whole.awaited += 1
            self._awaited[event.number] = look
        count = self._peers.counts.own
        if first and count and not look.in_parts:
            look.groups.append(_Group(count, look.samples))
        with self._timed(look):
            if look.groups and not look.in_parts:
                look.groups[0].norms.append(_length(gradient))
            if self._alone and len(look.groups) == 1:
                self._compare(look, bucket)

    def _summed_bucket(self, event: BucketDone) -> None:
        look = self._awaited.pop(event.number, None)
        if look is not None:
            with self._timed(look):
                look.whole.norms.append(_length(event.gradient))

    def _used(self, event: Applying) -> None:
        self._budget.end(event.stamp.host_s)
        look = self._now
        if look is None or look is self._first or not (self._sees_the_sum and look.over):
            return
        with self._timed(look):
            parameters = (p for group in event.optimizer.param_groups for p in group["params"])
            gradients = [p.grad for p in parameters if p.grad is not None]
            look.whole.used += _lengths(gradients)
            look.whole.used_size += sum(gradient.numel() for gradient in gradients)

    def _is_known(self, look: _Look) -> bool:
        return all(
            each.over
            and len(each.whole.norms) == each.whole.awaited
            and all(self._clock.passed(end) for _, end in each.marks)
            for each in (look, look.before)
            if each is not None
        )

    def _summed(self, look: _Look) -> list[float] | None:
        """Return the sums over the groups and, on worker 0, the squared norm of the whole."""
        if self._alone and len(look.groups) == 1:
            return None
        whole = look.unscaled(_norm(look.whole.norms)) ** 2
        return [*look.group_sums(), *([whole] if self._sees_the_sum else [])]

    def _compare(self, look: _Look, bucket: GradBucket) -> None:
        """Keep the bucket, or take its product with the one of the earlier step."""
        gradient = bucket.buffer().detach()
        members = [id(parameter) for parameter in bucket.parameters()]
        if look.before is None:
            if bucket.index() == 0:
                self._kept.clear()
            self._kept.append((members, gradient.clone()))
            self._first = look if look.over else None
            return
        kept, number = self._kept, len(look.products)
        if number < len(kept) and kept[number][0] == members and not gradient.is_sparse:
            wide = _wide(gradient)
            product = torch.dot(kept[number][1].to(wide), gradient.to(wide))
            look.products.append(_number(product))
        else:  # DistributedDataParallel has put the gradients into another order
            look.over = False
            self._now = None
        if bucket.is_last() or self._now is None:
            kept.clear()

    def _compared(self, look: _Look) -> list[float]:
        """Return sums over two steps as if they were the groups of one."""
        before = look.before
        assert before is not None  # else nothing is multiplied
        old, new = before.group_sums(), look.group_sums()
        product = before.unscaled(look.unscaled(math.fsum(float(each) for each in look.products)))
        squares = old.total * old.sqnorms + new.total * new.sqnorms
        whole = (squares + 2 * old.total * new.total * product) / (old.total + new.total) ** 2
        return [*(old + new), max(whole, 0.0)]

    def _clipped(self, look: _Look) -> float:
        """Return whether the optimizer got less than the whole gradient; NaN: not known."""
        used, whole = _norm(look.whole.used), _norm(look.whole.norms)
        complete = look.whole.used_size == look.whole.size
        if not complete or not (0 < used < math.inf and 0 < whole < math.inf):
            return math.nan  # another optimizer has the rest, or nothing is there
        ratio = look.unscaled(whole) / used
        doublings = round(math.log2(ratio))
        if self._scaler is None and doublings >= 1 and abs(ratio / 2**doublings - 1) < _EXACT:
            self._tell(2**doublings)
            return math.nan
        return float(ratio > _CLIPPED_FROM)

    def _tell(self, factor: int) -> None:
        if not self._told:
            self._told = True
            warnings.warn(
                f"gradients are divided by {factor} before the optimizer uses them, as a "
                "GradScaler does; pass it, Balancer(..., scaler=scaler), so that the gradient "
                "noise is measured rightly when its scale changes",
                PoiseWarning,
                stacklevel=2,
            )

    def _loss_scale(self) -> Tensor | None:
        """Return what losses are multiplied by now, without waiting for the device."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        return _number(self._scaler.scale(torch.ones((), device=self._device)))

    @contextmanager
    def _timed(self, look: _Look) -> Iterator[None]:
        start = self._clock.mark()
        yield
        look.marks.append((start, self._clock.mark()))


def _length(gradient: Tensor) -> Tensor:
    """Return a gradient's norm."""
    if gradient.is_sparse:
        gradient = gradient.detach().coalesce().values()
    return _number(torch.linalg.vector_norm(gradient.detach(), dtype=_wide(gradient)))


def _lengths(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return norms whose squares add up to the squared norm of all these gradients."""
    plain = all(g.dtype == _wide(g) and not g.is_sparse for g in gradients)
    if gradients and plain:
        return [_number(get_total_norm(gradients))]
    return [_length(gradient) for gradient in gradients]


def _wide(gradient: Tensor) -> torch.dtype:
    """Return the type to compute with: at least single precision."""
    return torch.promote_types(gradient.dtype, torch.float32)


def _number(value: Tensor) -> Tensor:
    """Send a number to the host, where it is when a stamp taken now has passed."""
    return value.detach().to("cpu", non_blocking=True)


def _norm(pieces: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float(piece) ** 2 for piece in pieces))
