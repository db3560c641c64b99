"""A worker's loader: it yields the local batches that the server hands out."""

from collections.abc import Iterator
from typing import Any

from poise.core.batch import steps_per_epoch
from poise.runtime.batches import Cut
from poise.runtime.orders import KeyedOrders
from poise.runtime.session import Fetching
from poise.torch.asynchronous.exchange import ServerExchange
from poise.torch.asynchronous.facts import Given
from poise.torch.asynchronous.messages import Handed, samples_of
from poise.torch.loader import ShareLoader


class JoinedLoader:
    """A loader of the local batches that the server hands to this worker, and their source."""

    def __init__(self, exchange: ServerExchange, given: Given) -> None:
        self.dataset = given.loader.dataset
        self._exchange = exchange
        self._given = given
        seed, slicer = given.settings.seed, given.settings.slicer
        self._loader = ShareLoader(given.loader, self, seed=seed, slicer=slicer)

    def __len__(self) -> int:
        """Global batches of an epoch; this worker's batches are as many as it manages."""
        length, global_batch = len(self._given.orders), self._given.settings.global_batch
        return steps_per_epoch(length, global_batch, drop_last=self._given.loader.drop_last)

    def __iter__(self) -> Iterator[Any]:
        more = self._exchange.begin(new_pass=True)
        while more:
            yield from self._loader
            more = self._exchange.begin(new_pass=False)

    def begin(self) -> Iterator[Cut]:
        """Take what was handed to this worker, until there is no more for now."""
        orders = self._given.orders
        while (handed := self._exchange.courier.next_share()) is not None:
            samples = handed.samples
            if samples is None:
                assert isinstance(orders, KeyedOrders)
                samples = samples_of(orders.at(handed.epoch), handed.ranges)
            yield Cut(handed, handed.epoch, list(samples))

    def loading(self) -> Fetching:
        """Measure how long it takes."""
        return self._exchange.measuring.fetching

    def hand_out(self, batch: Handed, contents: Any) -> None:
        """Note what is computed next, and what its loss is divided by."""
        count = self._given.settings.count
        divided_by = batch.count if count is None else float(count(contents))
        self._exchange.hand_out(batch, contents, divided_by)

    def end(self) -> None:
        """More may come."""
