"""A worker of a server, as its script sees it: the same three lines, and the same loop."""

import socket
from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from poise import __version__
from poise.core.batch import steps_per_epoch
from poise.core.plan import Plan
from poise.errors import InvalidSetting
from poise.runtime.batches import Cut
from poise.runtime.clocks import host_stamp
from poise.runtime.events import Events, Prepared
from poise.runtime.orders import KeyedOrders
from poise.runtime.session import Fetching
from poise.runtime.training import Saved, Schedule
from poise.torch.asynchronous.exchange import ServerExchange
from poise.torch.asynchronous.facts import Given, ServedTraining
from poise.torch.asynchronous.joining import Joining
from poise.torch.asynchronous.messages import About, Handed, Weights, samples_of
from poise.torch.asynchronous.role import WorkerRole
from poise.torch.asynchronous.service import Pushed
from poise.torch.checks import check_loader, prepared
from poise.torch.loader import ShareLoader, lead
from poise.torch.micro import Part
from poise.torch.settings import TorchSettings


class JoinedWorker(ServedTraining):
    """The training as one of the server's workers sees it."""

    def __init__(self, role: WorkerRole, settings: TorchSettings, events: Events) -> None:
        """Knock at the server's door."""
        super().__init__(settings, events)
        mode = None if role.mode is None else str(role.mode)
        about = About(__version__, mode, role.number, socket.gethostname())
        self._joining = Joining(role.address, about, settings.limits)
        self.worker = self._joining.worker
        self._exchange: ServerExchange | None = None

    @property
    def workers(self) -> int:
        """Workers that share the global batch now."""
        return len(self.plan.split)

    @property
    def plan(self) -> Plan:
        """The split as the server last told it."""
        return Plan((self._settings.global_batch,) if self._news is None else self._news.split)

    @property
    def progress(self) -> Pushed:
        """What is pushed so far, as the server last told it."""
        return Pushed(0 if self._news is None else self._news.samples)

    @property
    def learning_rate_factor(self) -> float:
        """What the rate of this worker's last push was multiplied by."""
        return 1.0 if self._news is None else self._news.factor

    @property
    def skipped(self) -> int:
        """Pushes of this worker that were dropped."""
        return 0 if self._news is None else self._news.dropped

    def prepare(self, model: Any, optimizer: Any, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
        """Join the training: the server must have the same model, optimizer and data."""
        given = self._first_given(self._exchange, model, optimizer, loader)
        epoch = self._joining.enter(given)
        self._exchange = ServerExchange(self._joining, given, epoch, self._events)
        told = (None, given.models, [given.optimizer], False, lead(loader))
        self._events.tell(Prepared(0, host_stamp(), *told))
        return model, optimizer, JoinedLoader(self._exchange, given)

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs from that on in which the server is."""
        exchange = prepared(self._exchange, "epochs")
        while (epoch := exchange.epoch) < total and not exchange.done:
            yield epoch
            if exchange.epoch == epoch:  # the loop left the loader before its end
                exchange.epoch = epoch + 1

    def evaluation(self, loader: DataLoader[Any]) -> list[Any]:
        """Return no batches: the server evaluates."""
        check_loader(loader)
        return []

    def micro_batches(self, batch: Any) -> Iterator[Part]:
        """Not with a server yet."""
        raise InvalidSetting(
            'micro_batches belong to mode="sync"; with a server, let the local batch fit into '
            "memory: lower global_batch, or bound it by Auto(bounds=Bounds(max_batch=...))"
        )

    def state_dict(self) -> Saved:
        """Return an empty state: the server's counts."""
        prepared(self._exchange, "state_dict")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the server's place counts."""
        prepared(self._exchange, "load_state_dict")

    def follow(self, schedule: Schedule) -> bool:
        """Leave it where it is: the server's own follows the samples."""
        return True

    def close(self) -> None:
        """Leave the server."""
        if self._exchange is not None:
            self._exchange.courier.leave()
        self._let_go()

    def fail(self, error: BaseException) -> None:
        """End the connection, from which the server knows that this worker is gone."""
        self._let_go()

    def _let_go(self) -> None:
        self._joining.leave()
        if self._exchange is not None:
            self._exchange.close()

    @property
    def _news(self) -> Weights | None:
        """What the server said last."""
        return None if self._exchange is None else self._exchange.news


class JoinedLoader:
    """A loader of the local batches that the server hands to this worker, and their source."""

    def __init__(self, exchange: ServerExchange, given: Given) -> None:
        self.dataset = given.loader.dataset
        self._exchange = exchange
        self._given = given
        self._loader = ShareLoader(given.loader, self, given.settings)

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
                samples = samples_of(orders.at(handed.share.epoch), handed.share.ranges)
            yield Cut(handed, handed.share.epoch, list(samples))

    def loading(self) -> Fetching:
        """Measure how long it takes."""
        return self._exchange.measuring.fetching

    def hand_out(self, batch: Handed, contents: Any) -> None:
        """Note what is computed next, and what its loss is divided by."""
        count = self._given.settings.count
        divided_by = batch.share.samples if count is None else float(count(contents))
        self._exchange.hand_out(batch, contents, divided_by)

    def end(self) -> None:
        """More may come."""
