"""The gradient of a local batch that is computed in parts, and its reduction."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from poise.errors import OutOfOrder
from poise.runtime.events import PartComputed
from poise.runtime.session import Session
from poise.torch.gloo import disconnecting
from poise.torch.module import Link

_BUCKET_BYTES = 25 * 2**20


class PartGradients:
    """Adds up the gradients of parts, each by its share of the local count.

    While parts run, the parameters' own gradients hold one part at a time, so that a part which
    fails leaves nothing behind.
    """

    def __init__(self, session: Session, links: Sequence[Link]) -> None:
        self._session = session
        self._links = links
        self._parameters = [
            [p for p in link.model.parameters() if p.requires_grad] for link in links
        ]
        self._before = {p: p.grad for group in self._parameters for p in group}
        """Gradients of earlier batches that the optimizer has not used yet."""
        self._sums: dict[nn.Parameter, Tensor] = {}

    def begin_part(self) -> None:
        """From now on backward gives the gradient of one part, on this worker alone."""
        self._clear()
        for link in self._links:
            link.alone = True

    def add_part(self, share: float, samples: int) -> None:
        """The part is done: its gradient, of so many samples, counts by this share."""
        self._end_part()
        gradients = {p: p.grad for p in self._before if p.grad is not None}
        if not gradients:
            raise OutOfOrder(
                "a part of the batch ended without a backward; compute its loss from the "
                "prepared model and call loss.backward() inside `with part as ...:`"
            )
        session = self._session
        if session.events.heard(PartComputed):
            count = share * session.peers.counts.own
            told = session.stamped(PartComputed, list(gradients.values()), count, samples)
            session.events.tell(told)
        for parameter, gradient in gradients.items():
            if share == 0:
                gradient.zero_()  # 0 times NaN would poison every worker
            elif share != 1:
                gradient.mul_(share)
            if parameter in self._sums:
                self._sums[parameter].add_(gradient)
            else:
                self._sums[parameter] = gradient
        self._clear()

    def drop_part(self) -> None:
        """The part failed: it counts for nothing."""
        self._end_part()
        self._clear()

    def reduce(self) -> None:
        """Sum over the workers; afterwards the parameters hold the gradient of the global batch.

        A parameter that no sample on any worker used keeps no gradient, as in one process.
        """
        used = self._used()
        for link, parameters in zip(self._links, self._parameters, strict=True):
            promised = [
                (bucket, link.gradients.hook(None, bucket))  # type: ignore[arg-type]
                for bucket in _buckets(parameters, self._sums)
            ]
            for bucket, future in promised:
                bucket.set_buffer(link.gradients.wait(future))
                for parameter, gradient in zip(bucket.members, bucket.gradients(), strict=True):
                    before = self._before[parameter]
                    if parameter in used and before is not None:
                        gradient.add_(before)
                    parameter.grad = gradient if parameter in used else before

    def _used(self) -> set[nn.Parameter]:
        """Return the parameters that got a gradient on any worker whose batch counts."""
        parameters = list(self._before)
        peers = self._session.peers
        counts = peers.counts.own > 0
        mine = [int(counts and p in self._sums) for p in parameters]
        mask = torch.tensor(mine, dtype=torch.int32, device=parameters[0].device)
        doing = f"the reduction of step {peers.liveness.here.step}"
        with peers.liveness.watch(doing), disconnecting():
            dist.all_reduce(mask, group=peers.generation.gradients)
        return {p for p, users in zip(parameters, mask.tolist(), strict=True) if users}

    def _end_part(self) -> None:
        for link in self._links:
            link.alone = False
            link.tally.backwards = link.tally.reduced

    def _clear(self) -> None:
        for parameter in self._before:
            parameter.grad = None


@dataclass
class Bucket:
    """Gradients side by side in one flat tensor: what DDP's own bucket offers to a hook."""

    number: int
    last: bool
    flat: Tensor
    members: list[nn.Parameter]

    def index(self) -> int:
        """Its number, from 0."""
        return self.number

    def is_last(self) -> bool:
        """Whether it is the last of its model."""
        return self.last

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self.flat

    def set_buffer(self, flat: Tensor) -> None:
        """Replace them."""
        self.flat = flat

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, in the order of their gradients."""
        return self.members

    def gradients(self) -> list[Tensor]:
        """Each parameter's gradient, as a view."""
        parts = torch.split(self.flat, [p.numel() for p in self.members])
        return [part.view_as(p) for part, p in zip(parts, self.members, strict=True)]


def _buckets(
    parameters: Sequence[nn.Parameter], sums: dict[nn.Parameter, Tensor]
) -> Iterator[Bucket]:
    """Lay a model's gradients into buckets, the same on every worker; empties the sums."""
    groups = list(_grouped(parameters))
    for number, members in enumerate(groups):
        flat = torch.cat([sums.pop(p, torch.zeros_like(p)).reshape(-1).detach() for p in members])
        yield Bucket(number, number == len(groups) - 1, flat, members)


def _grouped(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group neighbors of one kind, up to the size of a bucket."""
    for _, kind in groupby(parameters, key=lambda p: (p.dtype, p.device)):
        group: list[nn.Parameter] = []
        for parameter in kind:
            if group and _size(group) + _size([parameter]) > _BUCKET_BYTES:
                yield group
                group = []
            group.append(parameter)
        yield group


def _size(parameters: Sequence[nn.Parameter]) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)
