"""Micro-batches: a local batch in parts, one gradient, one reduction.

Each part's gradient counts by its share of the local count, and the sum of the parts is reduced
over the workers once, after the last of them. Workers may take different numbers of parts.

When a part does not fit into memory, its half-made gradient is thrown away and the rest of the
local batch goes on in parts of half the size, on this worker alone.
"""

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from poise.core.batch import Batch
from poise.errors import InvalidSetting, OutOfOrder, PoiseWarning
from poise.runtime.memory import Guard
from poise.runtime.session import Session
from poise.runtime.slicing import samples_left, sliced
from poise.torch.compiling import let_size_vary
from poise.torch.module import Link
from poise.torch.part_gradients import PartGradients

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""What a RuntimeError says when an allocation fails: accelerators, CPU, and libraries on them."""
_TOLERANCE = 1e-6


@dataclass(eq=False)
class MicroBatches:
    """Cuts this worker's local batches into parts that fit into its memory."""

    session: Session
    links: Sequence[Link]
    """What ties the models of the training to the other workers."""
    guard: Guard
    """Knows what fits."""
    most: int | None
    """Samples of one part; None: all of them, until that does not fit."""
    compiles: bool = field(kw_only=True)
    """Whether torch.compile is to be told that sizes vary."""
    unfinished: bool = field(default=False, init=False)
    """Whether the loop over the parts was left before the last one."""
    last: Batch | None = field(default=None, init=False)
    """The batch that was taken in parts last."""
    _told: bool = field(default=False, init=False)

    def of(self, batch: Any) -> Iterator["Part"]:
        """Yield the parts of the batch under way; then reduce their gradient."""
        counts = self.session.peers.counts
        under_way = self.last = self.session.progress.batch_to_reduce()
        samples = under_way.split[self.session.generation.worker]
        if samples and self.session.settings.slicer is None and counts.by_function:
            samples = samples_left(batch, samples)
        self.unfinished = True
        total = counts.own
        sums = PartGradients(self.session, self.links)
        self.guard.begin_parts()
        start, counted, tried, largest = 0, 0.0, 0, 0
        while start < max(samples, 1):
            stop = int(min(samples, start + self._most_samples()))
            contents = self._cut(batch, samples, start, stop)
            if self.compiles:
                let_size_vary(contents)
            count = self._count(contents, stop - start, samples) if total else 0.0
            part = Part(contents, sums, count / total if total else 0.0, samples=stop - start)
            del contents
            yield part
            if not part.entered:
                raise OutOfOrder(
                    "a part of the batch was not used; write `for part in "
                    "balancer.micro_batches(batch):` and in it `with part as (x, y):`"
                )
            if part.out_of_memory:
                tried = max(tried, stop - start)
                self.most = (stop - start + 1) // 2
                self.guard.ran_out(stop - start)
                _free_memory()
            else:
                largest = max(largest, stop - start)
                start, counted = max(stop, 1), counted + count
        if abs(counted - total) > _TOLERANCE * max(total, 1.0):
            raise InvalidSetting(
                f"count gave {total:g} for the local batch, but {counted:g} for its parts "
                "together; the count of a batch must be the sum of the counts of its parts"
            )
        self._tell(tried)
        self.guard.end_parts(largest)
        sums.reduce()
        self.unfinished = False

    def _most_samples(self) -> float:
        """Return how many samples one part may have, as stated and as memory allows."""
        return min(math.inf if self.most is None else self.most, self.guard.most_samples)

    def _cut(self, batch: Any, samples: int, start: int, stop: int) -> Any:
        if stop - start == samples:
            return batch
        slicer = self.session.settings.slicer
        return sliced(batch, samples, start, stop) if slicer is None else slicer(batch, start, stop)

    def _count(self, contents: Any, samples: int, of: int) -> float:
        counts = self.session.peers.counts
        if counts.by_function:
            return counts.of(contents)
        return counts.own * samples / of

    def _tell(self, tried: int) -> None:
        """Say once that memory was short, and what to state to save the failed attempt."""
        if self._told or not tried:
            return
        self._told = True
        warnings.warn(
            f"worker {self.session.generation.worker} ran out of memory with {tried} samples at "
            f"once and goes on in parts of {self.most}; the gradient is the same. To start with "
            "this size, state it for this worker in Balancer(..., micro_batch=[...])",
            PoiseWarning,
            stacklevel=3,
        )


class Part:
    """One part of a local batch: `with part as (x, y):` runs forward and backward on it."""

    def __init__(self, contents: Any, sums: PartGradients, share: float, *, samples: int) -> None:
        self._contents = contents
        self._sums = sums
        self._share = share
        self._samples = samples
        self.entered = False
        self.out_of_memory = False
        """Whether memory was short, so that this part counts for nothing."""

    def __enter__(self) -> Any:
        self.entered = True
        self._sums.begin_part()
        contents, self._contents = self._contents, None
        return contents

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            self._sums.add_part(self._share, self._samples)
            return False
        self._sums.drop_part()
        self.out_of_memory = _is_out_of_memory(error)
        if self.out_of_memory and self._samples <= 1:
            error.add_note("poise: one sample alone does not fit into this worker's memory")
            return False
        return self.out_of_memory

    def __iter__(self) -> Any:
        raise OutOfOrder(
            "a part of a batch was unpacked; write `with part as (x, y):`, so that a lack of "
            "memory inside can be caught"
        )


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def _free_memory() -> None:
    """Give what the failed attempt left in the allocator's cache back to the device."""
    if torch.accelerator.is_available():
        getattr(torch, torch.accelerator.current_accelerator().type).empty_cache()  # type: ignore[union-attr]
