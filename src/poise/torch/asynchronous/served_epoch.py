"""The server's loader: a pass over it serves the workers, and yields nothing."""

import time
from collections.abc import Iterator
from typing import Any

from poise.core.batch import steps_per_epoch
from poise.errors import InvalidSetting
from poise.runtime.orders import KeyedOrders, Orders
from poise.torch.asynchronous.desk import Desk
from poise.torch.asynchronous.role import Serving
from poise.torch.asynchronous.saves import Saves

_SHOW_S = 1.0


class ServedEpoch:
    """Serves until every sample of the epoch is pushed; shows and saves in between."""

    def __init__(
        self, desk: Desk, orders: Orders, saves: Saves, serving: Serving, address: str
    ) -> None:
        self._desk = desk
        self._orders = orders
        self._saves = saves
        self._serving = serving
        self._address = address
        self._saved_s = self._shown_s = time.monotonic()

    def __len__(self) -> int:
        course = self._desk.course
        return steps_per_epoch(course.engine.length, course.global_batch, drop_last=False)

    def __iter__(self) -> Iterator[Any]:
        course = self._desk.course
        self._saves.begin()
        order = self._orders.at(course.engine.epoch)
        if order.length != len(self._orders):
            raise InvalidSetting(
                f"the sampler drew {order.length} samples and its length is {len(self._orders)}; "
                'a server hands out as many as that says: mend one of them, or use mode="sync"'
            )
        course.open(None if isinstance(self._orders, KeyedOrders) else order)
        while course.goes_on(closed=self._serving.closed):
            self._desk.events.raise_kept()
            self._show_and_save(_SHOW_S, self._serving.save_every_s)
        self._desk.parameters.follow()
        self._show_and_save(0.0, 0.0)
        return iter(())

    def _show_and_save(self, show_every_s: float, save_every_s: float) -> None:
        """Show and save what has not been shown and saved for so many seconds."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= show_every_s:
            self._shown_s = now_s
            if self._serving.show is not None:
                self._serving.show(self._desk.service(self._address))
        if now_s - self._saved_s >= save_every_s:
            self._saves.save()
            self._saved_s = time.monotonic()
