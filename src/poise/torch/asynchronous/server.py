"""The server of a training: runs the user's own script, and serves instead of computing.

Its loader yields nothing: a pass over it serves the workers until every sample of the epoch is
pushed. Whatever the script does between two passes, such as to evaluate or to save, is done here
while nothing moves.
"""

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from poise import __version__
from poise.core.batch import steps_per_epoch
from poise.core.noise import NoiseTrack
from poise.core.plan import Plan
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.engine.modes import Async, Stale
from poise.environment import shared_secret
from poise.errors import (
    Disagreement,
    InvalidSetting,
    OutOfOrder,
    PoiseError,
    PoiseWarning,
    StateMismatch,
    WorkerLost,
)
from poise.records import Recorder
from poise.runtime.channel import GONE, Channel
from poise.runtime.door import Door, check_secret
from poise.torch.asynchronous.desk import LOOK_S, Desk, Failed, Guest
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
from poise.torch.asynchronous.messages import About, Begin, Leave, NoMore, Push, about_of
from poise.torch.asynchronous.parameters import Parameters, everything, momentum_notice
from poise.torch.asynchronous.role import Role
from poise.torch.asynchronous.service import Service
from poise.torch.checks import (
    as_list,
    check_epoch,
    check_loader,
    check_models,
    check_optimizers,
    length_of,
)
from poise.torch.micro import Part
from poise.torch.orders import KeyedOrders, orders_of
from poise.torch.saved import Saved
from poise.torch.settings import Settings

_SHOW_S = 1.0
_HANG_S = 1800.0
_GOODBYE_S = 5.0
_LABEL = 120
"""Characters of a worker's words that are shown."""
_VERSION = 1
_log = logging.getLogger("poise")


class Server:
    """The training as its server sees it."""

    worker = 0
    noise: NoiseTrack | None = None
    learning_rate_factor = 1.0

    def __init__(self, role: Role, settings: Settings) -> None:
        """Listen for workers; they wait until the script gets to its first pass."""
        assert role.mode is not None
        assert role.serving is not None
        check_alone(settings)
        self._mode: Async | Stale = role.mode
        self._serving = role.serving
        self._settings = settings
        self._state = threading.Condition()
        """Guards what threads share; who changes it tells all."""
        self._desk: Desk | None = None
        """None until the script prepares its training."""
        self._opened = False
        """Whether a pass has begun."""
        self._ended: NoMore | str | None = None
        """What workers are told once it ends."""
        self._failure: BaseException | None = None
        self._numbers: set[int] = set()
        """Of workers that are here or about to be."""
        self._schedules: list[Schedule] = []
        self._saved_schedules: list[Any] = []
        """Of a restart, until the script makes the schedules that they are of."""
        self._saved_optimizer: dict[str, Any] = {}
        """The same, since a schedule that is made changes rates."""
        host, secret = self._serving.host, shared_secret()
        check_secret(host, secret)
        self._door = Door(host, self._serving.port, secret, about_of, self._meet)
        self.address = self._door.address
        if self._serving.announce is not None:
            self._serving.announce(self.address)

    @property
    def workers(self) -> int:
        """Workers that are here."""
        return 0 if self._desk is None else len(self._desk.engine.members)

    @property
    def plan(self) -> Plan:
        """The plan for what is handed out next."""
        return self._prepared("plan").engine.plan

    @property
    def samples(self) -> int:
        """Pushed so far."""
        return 0 if self._desk is None else self._desk.engine.samples

    @property
    def effective_samples(self) -> float:
        """The same."""
        return float(self.samples)

    @property
    def skipped(self) -> int:
        """Pushes that were dropped."""
        if self._desk is None:
            return 0
        engine = self._desk.engine
        tallies = [*(member.tally for member in engine.members), *engine.gone.values()]
        return sum(tally.dropped for tally in tallies)

    def prepare(self, model: Any, optimizer: Any, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
        """Take the script's model and optimizer as those of the training."""
        if self._desk is not None:
            raise OutOfOrder("prepare was called before; make one Balancer per training")
        models, optimizers = as_list(model), as_list(optimizer)
        check_models(models)
        check_optimizers(optimizers, models)
        check_loader(loader)
        check_servable(optimizers, loader)
        self._models: Sequence[nn.Module] = models
        self._optimizer: Optimizer = optimizers[0]
        settings, workers = self._settings, self._serving.workers
        self._orders = orders_of(loader, length_of(loader), settings.seed, DrawnAlone())
        self._facts = facts_of(settings, models, self._optimizer, loader, self._orders)
        length = len(self._orders)
        if loader.drop_last:
            check_epoch(length, settings.global_batch)
            length -= length % settings.global_batch
        most_shards = 1 if isinstance(self._mode, Stale) else len(os.sched_getaffinity(0))
        parameters = Parameters(models, self._optimizer, most_shards)
        decides = Engine(settings.policy, workers, settings.global_batch)
        engine = AsyncEngine.begin(self._mode, decides, length)
        recorder = None
        if settings.record is not None:
            recorder = Recorder(settings.record, decides, mode=str(self._mode))
        desk = Desk(engine, parameters, self._state, recorder)
        self._saved_s = self._shown_s = time.monotonic()
        with self._state:
            self._desk = desk
            if self._serving.save is not None and self._serving.save.exists():
                self._restore()
            self._state.notify_all()
        notice = momentum_notice(self._mode, self._optimizer, workers)
        if notice:
            warnings.warn(notice, PoiseWarning, stacklevel=3)
        steps = steps_per_epoch(length, settings.global_batch, drop_last=False)
        return model, optimizer, ServedEpoch(self, steps)

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs that are left."""
        desk = self._prepared("epochs")
        while (epoch := desk.engine.epoch) < total and not desk.engine.finished:
            yield epoch
            with self._state:
                if desk.engine.epoch == epoch and not desk.engine.finished:
                    desk.engine = desk.engine.next_epoch()  # the loop did not come to the loader

    def evaluation(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader itself: the server evaluates alone."""
        check_loader(loader)
        return loader

    def micro_batches(self, batch: Any) -> Iterator[Part]:
        """Nothing is computed here."""
        raise OutOfOrder("a server computes no batches; take them from the prepared loader")

    def mean(self, value: float | Tensor, count: float) -> float:
        """Return the value: the server evaluates alone."""
        return own_mean(value, count)

    def state_dict(self) -> Saved:
        """Return the place in the training, and what was learned of the workers."""
        desk = self._prepared("state_dict")
        with desk.still():
            place = desk.engine.state_dict()
        drawn = self._orders.drawn(place["epoch"]) if place["position"] else ""
        return {**self._identity(), **place, "drawn": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place, before the first pass."""
        desk = self._prepared("load_state_dict")
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise StateMismatch(
                    f"the state has {key}={state.get(key)!r} and this training {key}={value!r}; "
                    "resume with the mode, data set, shuffling and seed it was saved with"
                )
        loaded = desk.engine.load_state_dict(state)
        self._orders.expect(loaded.epoch, loaded.pool.position, state.get("drawn", ""))
        desk.engine = loaded

    def follow(self, schedule: Schedule) -> bool:
        """Let a schedule follow the samples before each update, whatever the script calls."""
        if self._saved_schedules:
            schedule.load_state_dict(self._saved_schedules.pop(0))
            self._optimizer.load_state_dict(self._saved_optimizer)
        self._schedules.append(schedule)
        self._prepared("a schedule").parameters.before_update.append(schedule.follow)
        return True

    def close(self) -> None:
        """Tell the workers that it is done, and let go of everything."""
        epoch = 0 if self._desk is None else self._desk.engine.epoch
        self._end(NoMore(epoch, done=True))

    def fail(self, error: BaseException, *, leave: bool = True) -> None:
        """Tell the workers why the server stops."""
        interrupted = isinstance(error, KeyboardInterrupt)
        self._end("it was interrupted" if interrupted else f"{type(error).__name__}: {error}")

    def service(self) -> Service:
        """Return what the server does, at this moment."""
        return self._prepared("service").service(self.address)

    def serve(self) -> None:
        """Serve the workers until every sample of the epoch is pushed."""
        desk = self._prepared("a pass over the loader")
        self._check_schedules()
        self._saved_schedules, self._saved_optimizer = [], {}  # the script has made its schedules
        order = self._orders.at(desk.engine.epoch)
        if order.length != len(self._orders):
            raise InvalidSetting(
                f"the sampler drew {order.length} samples and its length is {len(self._orders)}; "
                'a server hands out as many as that says: mend one of them, or use mode="sync"'
            )
        desk.order = None if isinstance(self._orders, KeyedOrders) else order
        with self._state:
            desk.is_open = self._opened = True
            self._state.notify_all()
        while not self._ends_epoch(desk):
            self._on_schedule()
        desk.parameters.follow()
        self._show()
        if self._serving.save is not None:
            self._save()

    def _ends_epoch(self, desk: Desk) -> bool:
        """Wait for news; if the epoch is over, turn to the next one."""
        with self._state:
            if self._failure is None and not desk.engine.over:
                if self._serving.closed and desk.engine.abandoned:
                    raise WorkerLost(
                        "all workers are lost, and a closed server waits for no others; start it "
                        "again, from its last save, or leave --closed out so that others can join"
                    )
                self._state.wait(LOOK_S)
                return False
            desk.is_open = False
            if self._failure is not None:
                raise self._failure
            if desk.engine.finished:
                _log.warning("all workers were done and have left, so training ends here")
            else:
                desk.engine = desk.engine.next_epoch()
            self._state.notify_all()
            return True

    def _check_schedules(self) -> None:
        """Raise for a schedule that a restart would begin anew, without a word."""
        scheduled = hasattr(self._optimizer.step, "_wrapped_by_lr_sched")  # a mark of torch's
        if self._serving.save is not None and scheduled and not self._schedules:
            raise InvalidSetting(
                "the optimizer has a scheduler that --save does not know, so that a restart would "
                "begin it anew; wrap it in BySamples, with the samples of an epoch as "
                "samples_per_step if it is to step once per epoch, or save in the script instead"
            )

    def _on_schedule(self) -> None:
        now_s = time.monotonic()
        if now_s - self._shown_s >= _SHOW_S:
            self._show()
        if self._serving.save is not None and now_s - self._saved_s >= self._serving.save_every_s:
            self._save()

    def _show(self) -> None:
        self._shown_s = time.monotonic()
        if self._serving.show is not None:
            self._serving.show(self.service())

    def _save(self) -> None:
        """Write everything to a file that is complete at any time."""
        path = self._serving.save
        assert path is not None
        beside = path.with_name(path.name + ".new")
        desk = self._prepared("save")
        with desk.still():
            if desk.broken:
                return
            state = {
                "models": [model.state_dict() for model in self._models],
                "optimizer": self._optimizer.state_dict(),
                "schedules": [schedule.state_dict() for schedule in self._schedules],
                "balancer": self.state_dict(),
            }
            with beside.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
        self._saved_s = time.monotonic()

    def _restore(self) -> None:
        path = self._serving.save
        assert path is not None
        try:
            state = torch.load(path, weights_only=True, map_location="cpu")
            for model, saved in zip(self._models, state["models"], strict=True):
                model.load_state_dict(saved)
            self._optimizer.load_state_dict(state["optimizer"])
            self._saved_optimizer = state["optimizer"]
            self._saved_schedules = list(state["schedules"])
            self.load_state_dict(state["balancer"])
        except PoiseError:
            raise
        except Exception as error:
            raise StateMismatch(
                f"{path} does not fit this training, or is damaged ({_first_line(error)}); move it "
                "away to start anew"
            ) from error
        _log.info("going on from %s, epoch %d", path, self._prepared("restore").engine.epoch)

    def _end(self, said: NoMore | str) -> None:
        with self._state:
            if self._ended is not None:
                return
            self._ended = said
            desk = self._desk
            if desk is not None:
                desk.ended, desk.is_open = said, False
            self._state.notify_all()
            deadline_s = time.monotonic() + _GOODBYE_S
            while desk is not None and not desk.empty and time.monotonic() < deadline_s:
                self._state.wait(LOOK_S)
        self._door.close(_GOODBYE_S)
        if desk is not None:
            desk.close()

    def _identity(self) -> Saved:
        return {
            "version": f"asynchronous {_VERSION}",
            "mode": str(self._mode),
            "seed": self._settings.seed,
            "global_batch": self._settings.global_batch,
            **self._orders.identity(),
        }

    def _prepared(self, call: str) -> Desk:
        if self._desk is None:
            raise OutOfOrder(f"{call} needs the data set; call prepare first")
        return self._desk

    def _meet(self, channel: Channel, about: About) -> None:
        """Host a worker, in a thread of its own, until it leaves."""
        link = Link(channel)
        try:
            with self._state:
                worker = self._number(about.number)
                self._numbers.add(worker)
            self._host(worker, link, about)
        except GONE as error:
            _log.info("a connection is closed: %s", error)
            self._say_goodbye(link)
        except Disagreement as error:
            _log.warning("a worker is refused: %s", error)
            with suppress(*GONE):
                link.channel.tell({"refused": str(error)})
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, Failed) and error.__cause__ else error
            with self._state:
                self._failure = self._failure or cause
            with suppress(*GONE):
                link.channel.tell({"failed": f"the server failed: {type(cause).__name__}: {cause}"})
        finally:
            with self._state:
                self._numbers.discard(worker)
                self._state.notify_all()
            link.close()

    def _say_goodbye(self, link: Link) -> None:
        """Tell a worker whose connection ends with the server why, as far as it can still hear."""
        if self._ended is None:
            return
        said = {"failed": f"the server failed: {self._ended}"}
        if isinstance(self._ended, NoMore):
            said = {"refused": "the training is over"}
        with suppress(*GONE):
            link.channel.tell(said)

    def _number(self, wanted: int | None) -> int:
        """Return the number that a worker wants, or the first that is free."""
        if wanted is not None and wanted > 0 and wanted not in self._numbers:
            return wanted
        free = range(1, len(self._numbers) + 2)
        return next(number for number in free if number not in self._numbers)

    def _host(self, worker: int, link: Link, about: About) -> None:
        _check_about(about, self._mode)
        link.channel.set_limit(None)  # its script may take its time until it prepares
        ahead = isinstance(self._mode, Async) and self._mode.ahead
        link.channel.tell({"worker": worker, "mode": str(self._mode), "ahead": ahead})
        training = link.channel.hear()
        self._await(link, lambda: self._desk is not None)
        difference = _difference(self._facts, training.get("facts"))
        if difference:
            raise Disagreement(difference)
        link.channel.set_limit(self._settings.hang_s or _HANG_S)
        link.channel.tell({"accepted": True})
        link.pair_up(server=True)
        self._await(link, lambda: self._opened)
        desk = self._prepared("join")
        link.channel.tell({"epoch": desk.engine.epoch})
        # What is trained comes again, up to date, with the first samples.
        whole = Flat(everything(self._models))
        whole.read(everything(self._models))
        link.send(whole.bytes)
        rooms = desk.parameters.buffer(), desk.parameters.buffer()
        label = _printable(f"{about.host}, {training.get('device')}")
        guest = Guest(link, worker, label, *rooms)
        desk.join(guest)
        try:
            while self._answered(desk, guest):
                pass
        finally:
            desk.leave(guest)

    def _answered(self, desk: Desk, guest: Guest) -> bool:
        """Do what a worker asks for; False: it leaves."""
        match guest.link.listen():
            case Leave():
                guest.done = True
                return False
            case Begin() as asked:
                desk.begin(guest, asked)
            case Push() as push:
                desk.push(guest, push)
            case other:
                raise Disagreement(f"worker {guest.worker} sent {type(other).__name__}")
        return True

    def _await(self, link: Link, ready: Callable[[], bool]) -> None:
        """Wait for something of the server's own, as long as the worker is there."""
        with self._state:
            while not ready():
                if self._ended is not None:
                    raise EOFError("the server has ended")
                self._state.wait(LOOK_S)
                if link.channel.ended():
                    raise EOFError("the connection is closed")


class ServedEpoch:
    """The server's loader: a pass over it serves the workers, and yields nothing."""

    def __init__(self, server: Server, steps: int) -> None:
        self._server = server
        self._steps = steps

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        self._server.serve()
        return iter(())


def _printable(text: str) -> str:
    """Return a worker's words as a table can show them."""
    return "".join(each if each.isprintable() else "?" for each in text[:_LABEL])


def _first_line(error: Exception) -> str:
    """Say in short what torch says at length."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _check_about(about: About, mode: Async | Stale) -> None:
    if about.version != __version__:
        raise Disagreement(
            f"it has Poise {about.version} and the server {__version__}; install the same version"
        )
    if about.mode is not None and about.mode != str(mode):
        raise Disagreement(f'its script says mode="{about.mode}" and the server has "{mode}"')


def _difference(expected: Mapping[str, str], found: object) -> str:
    """Say where a worker's facts differ from the server's; "" if nowhere."""
    if not isinstance(found, dict):
        return "it says nothing of its model and data"
    for key in [*expected, *(key for key in found if key not in expected)]:
        if expected.get(key) != found.get(key):
            return (
                f"{key} is {found.get(key, 'missing')} there and {expected.get(key, 'missing')} "
                "on the server; run the same script with the same settings and data"
            )
    return ""
