"""A worker's loader: it yields the local batches that the server hands out."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.utils.data import DataLoader

from poise.core.batch import steps_per_epoch
from poise.runtime.batches import Cut
from poise.runtime.counts import CountFunction
from poise.runtime.orders import KeyedOrders, Orders
from poise.runtime.settings import Settings
from poise.torch.asynchronous.exchange import ServerExchange
from poise.torch.asynchronous.messages import Handed
from poise.torch.loader import ShareLoader


class JoinedLoader:
    """A loader of the local batches that the server hands to this worker."""

    def __init__(
        self, loader: DataLoader[Any], exchange: ServerExchange, orders: Orders, settings: Settings
    ) -> None:
        self.dataset = loader.dataset
        length = len(orders)
        self._steps = steps_per_epoch(length, settings.global_batch, drop_last=loader.drop_last)
        self._exchange = exchange
        source = _Handed(exchange, orders, settings.count, self._steps)
        self._loader = ShareLoader(loader, source, seed=settings.seed, slicer=settings.slicer)

    def __len__(self) -> int:
        """Global batches of an epoch; this worker's batches are as many as it manages."""
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        more = self._exchange.begin(new_pass=True)
        while more:
            yield from self._loader
            more = self._exchange.begin(new_pass=False)


class _Handed:
    """The source of what the server hands out, until it has no more for now."""

    def __init__(
        self, exchange: ServerExchange, orders: Orders, count: CountFunction | None, steps: int
    ) -> None:
        self._exchange = exchange
        self._orders = orders
        self._count = count
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def begin(self) -> Iterator[Cut]:
        """Take what was handed to this worker, as long as there is some."""
        while (handed := self._exchange.next_share()) is not None:
            yield Cut(handed, handed.epoch, self._samples(handed))

    def loading(self) -> AbstractContextManager[None]:
        """Measure how long it takes."""
        return self._exchange.loading()

    def hand_out(self, batch: Handed, contents: Any) -> None:
        """Note what is computed next, and what its loss is divided by."""
        count = batch.count if self._count is None else float(self._count(contents))
        self._exchange.hand_out(batch, contents, count)

    def end(self) -> None:
        """More may come."""

    def _samples(self, handed: Handed) -> list[int]:
        if handed.samples is not None:
            return list(handed.samples)
        assert isinstance(self._orders, KeyedOrders)
        order = self._orders.at(handed.epoch)
        return [sample for span in handed.ranges for sample in order.at(*span).tolist()]
