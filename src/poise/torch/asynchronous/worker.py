"""A worker of a server, as its script sees it: the same three lines, and the same loop."""

import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from poise import __version__
from poise.core.batch import steps_per_epoch
from poise.core.noise import NoiseTrack
from poise.core.plan import Plan
from poise.environment import local_workers, shared_secret
from poise.errors import Disagreement, InvalidSetting, OutOfOrder, ServerLost
from poise.lab.line import tell_prepared, tell_step
from poise.runtime.door import knock
from poise.torch.asynchronous.exchange import ServerExchange, Waits
from poise.torch.asynchronous.facts import (
    DrawnAlone,
    Schedule,
    check_alone,
    check_servable,
    facts_of,
    own_mean,
)
from poise.torch.asynchronous.flat import Flat
from poise.torch.asynchronous.link import Link
from poise.torch.asynchronous.messages import About, Handed, Weights, text_of
from poise.torch.asynchronous.parameters import everything
from poise.torch.asynchronous.role import Role
from poise.torch.checks import as_list, check_loader, check_models, check_optimizers, length_of
from poise.torch.clocks import clock_of
from poise.torch.counts import CountFunction
from poise.torch.learned import device_kind
from poise.torch.loader import Cut, ShareLoader, lead
from poise.torch.memory import Guard, memory_of
from poise.torch.meter import Meter
from poise.torch.micro import Part
from poise.torch.orders import KeyedOrders, Orders, orders_of
from poise.torch.saved import Saved
from poise.torch.seeding import Wanted
from poise.torch.settings import Settings

_PATIENCE_S = 300.0
"""How long a server is waited for that does not listen yet."""
_AGAIN_S = 0.2
_SAY_S = 3.0
_CLOSED_S = 15.0
"""How long a server may hang up at once: it hears only so many at a time that it does not know."""
_LAST_PORT = 65535


class JoinedWorker:
    """The training as one of the server's workers sees it."""

    noise: NoiseTrack | None = None

    def __init__(self, role: Role, settings: Settings) -> None:
        """Knock at the server's door."""
        check_alone(settings)
        if settings.recorded:
            settings = settings.unrecorded()  # the server writes the record
        self._settings = settings
        self._address = role.address
        mode = None if role.mode is None else str(role.mode)
        about = About(__version__, mode, role.number, socket.gethostname())
        self._link = _let_in(role.address, about)
        self._link.channel.set_limit(None)
        answer = self._heard()
        self.worker = int(answer["worker"])
        self._ahead = bool(answer["ahead"])
        self._exchange: ServerExchange | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def workers(self) -> int:
        """Workers that share the global batch now."""
        return len(self.plan.split)

    @property
    def plan(self) -> Plan:
        """The split as the server last told it."""
        return Plan((self._settings.global_batch,) if self._news is None else self._news.split)

    @property
    def samples(self) -> int:
        """Pushed so far, over all workers, as the server last told it."""
        return 0 if self._news is None else self._news.samples

    @property
    def effective_samples(self) -> float:
        """The same."""
        return float(self.samples)

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
        if self._exchange is not None:
            raise OutOfOrder("prepare was called before; make one Balancer per training")
        models, optimizers = as_list(model), as_list(optimizer)
        check_models(models)
        check_optimizers(optimizers, models)
        check_loader(loader)
        check_servable(optimizers, loader)
        orders = orders_of(loader, length_of(loader), self._settings.seed, DrawnAlone())
        stepped: Optimizer = optimizers[0]
        device = next(p.device for each in models for p in each.parameters() if p.requires_grad)
        self._tell(
            {
                "facts": facts_of(self._settings, models, stepped, loader, orders),
                "device": device_kind(device),
            }
        )
        self._heard()  # it is accepted
        whole = Flat(everything(models))
        try:
            self._link.pair_up(server=False)
            epoch = int(self._heard()["epoch"])  # the server has begun
            self._link.receive(whole.bytes)
        except OSError as error:
            raise self._lost(error) from error
        whole.write(everything(models))
        waits = Waits()
        memory = Guard(memory_of(device, sharers=local_workers() or 1))
        self._exchange = exchange = ServerExchange(
            self._link,
            self._address,
            stepped,
            models,
            meter=Meter(clock_of(device), memory, waits, loads_itself=loader.num_workers == 0),
            waits=waits,
            ahead=self._ahead,
            shares_at_once=lead(loader) + 1,
            epoch=epoch,
        )
        self._hooks = [
            stepped.register_step_pre_hook(exchange.push),
            stepped.register_step_post_hook(exchange.restore),
        ]
        tell_prepared(models)
        return model, optimizer, JoinedLoader(loader, exchange, orders, self._settings)

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs from that on in which the server is."""
        exchange = self._prepared("epochs")
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

    def mean(self, value: float | Tensor, count: float) -> float:
        """Return the value: nothing is called together."""
        return own_mean(value, count)

    def state_dict(self) -> Saved:
        """Return an empty state: the server's counts."""
        self._prepared("state_dict")
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing: the server's place counts."""
        self._prepared("load_state_dict")

    def follow(self, schedule: Schedule) -> bool:
        """Leave it where it is: the server's own follows the samples."""
        return True

    def close(self) -> None:
        """Leave the server."""
        if self._exchange is not None:
            self._exchange.leave()
        self._let_go()

    def fail(self, error: BaseException, *, leave: bool = True) -> None:
        """End the connection, from which the server knows that this worker is gone."""
        self._let_go()

    def _let_go(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._exchange is not None:
            self._exchange.close()
        self._link.close()

    @property
    def _news(self) -> Weights | None:
        """What the server said last."""
        return None if self._exchange is None else self._exchange.news

    def _prepared(self, call: str) -> ServerExchange:
        if self._exchange is None:
            raise OutOfOrder(f"{call} needs the data set; call prepare first")
        return self._exchange

    def _tell(self, message: Mapping[str, Any]) -> None:
        try:
            self._link.channel.tell(message)
        except OSError as error:
            raise self._lost(error) from error

    def _heard(self) -> dict[str, Any]:
        try:
            answer = self._link.channel.hear()
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        if "refused" in answer:
            raise Disagreement(f"the server at {self._address} refuses: {answer['refused']}")
        if "failed" in answer:
            raise ServerLost(str(answer["failed"]))
        return answer

    def _lost(self, error: BaseException) -> ServerLost:
        return ServerLost(
            f"the server at {self._address} is gone ({error}); start it again, from its last "
            "save, and then this worker"
        )


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
            yield Cut(handed, Wanted(handed.epoch, self._samples(handed)))

    def loading(self) -> AbstractContextManager[None]:
        """Measure how long it takes."""
        return self._exchange.loading()

    def hand_out(self, batch: Handed, contents: Any) -> None:
        """Note what is computed next, and what its loss is divided by."""
        count = batch.count if self._count is None else float(self._count(contents))
        self._exchange.hand_out(batch, count)
        tell_step()

    def end(self) -> None:
        """More may come."""

    def _samples(self, handed: Handed) -> list[int]:
        if handed.samples is not None:
            return list(handed.samples)
        assert isinstance(self._orders, KeyedOrders)
        order = self._orders.at(handed.epoch)
        parts = [order.at(start, stop).tolist() for start, stop in handed.ranges]
        return [sample for part in parts for sample in part]


def _let_in(address: str, about: About) -> Link:
    """Return a connection with a server that has let this worker in."""
    begin_s = time.monotonic()
    while True:
        end = _reached(address)
        try:
            return Link(knock(end, shared_secret(), text_of(about)))
        except ServerLost:
            if time.monotonic() - begin_s > _CLOSED_S:
                raise
            time.sleep(_AGAIN_S)


def _reached(address: str) -> socket.socket:
    """Return a connection with the server, which may not have started yet."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
        raise InvalidSetting(f"POISE_SERVER={address!r} is no address; give host:port")
    host = host.removeprefix("[").removesuffix("]")
    begin_s = time.monotonic()
    said = False
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=10)
        except OSError as error:
            waited_s = time.monotonic() - begin_s
            if waited_s > _PATIENCE_S or isinstance(error, socket.gaierror):
                raise ServerLost(
                    f"no server can be reached at {address}: {error}; start `poise serve` there"
                ) from error
            if waited_s > _SAY_S and not said:
                said = True
                sys.stderr.write(f"poise: waiting for the server at {address}\n")
            time.sleep(_AGAIN_S)
