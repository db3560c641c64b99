"""The server of a training: runs the user's own script, and serves instead of computing.

Its loader yields nothing: a pass over it serves the workers until every sample of the epoch is
pushed. Whatever the script does between two passes, such as to evaluate or to save, is done here
while nothing moves.
"""

import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from poise.core.batch import steps_per_epoch
from poise.core.plan import Plan
from poise.engine.asp import AsyncEngine
from poise.engine.bsp import Engine
from poise.errors import InvalidSetting, OutOfOrder, PoiseWarning
from poise.records import Recorder
from poise.runtime.checks import check_epoch
from poise.runtime.clocks import host_stamp
from poise.runtime.events import Closed, Events, Prepared
from poise.runtime.orders import KeyedOrders
from poise.runtime.training import Saved, Schedule
from poise.torch.asynchronous.admission import Admission
from poise.torch.asynchronous.course import Course, Ending
from poise.torch.asynchronous.desk import Desk
from poise.torch.asynchronous.facts import ServedTraining
from poise.torch.asynchronous.messages import NoMore
from poise.torch.asynchronous.parameters import momentum_notice
from poise.torch.asynchronous.role import ServerRole, Serving
from poise.torch.asynchronous.saves import Saves
from poise.torch.asynchronous.service import Pushed
from poise.torch.checks import check_loader, prepared
from poise.torch.micro import Part
from poise.torch.settings import TorchSettings

_SHOW_S = 1.0


class Server(ServedTraining):
    """The training as its server sees it."""

    worker = 0
    learning_rate_factor = 1.0

    def __init__(self, role: ServerRole, settings: TorchSettings, events: Events) -> None:
        """Listen for workers; they wait until the script gets to its first pass."""
        super().__init__(settings, events)
        self.mode = role.mode
        self._serving = role.serving
        self._served: ServedEpoch | None = None
        """None until the script prepares its training."""
        self._course = Course()
        self._admission = Admission(role, self._course, settings.limits)
        self.address = self._admission.address
        if role.serving.announce is not None:
            role.serving.announce(self.address)

    @property
    def workers(self) -> int:
        """Workers that are here."""
        return 0 if self._served is None else len(self._course.engine.members)

    @property
    def plan(self) -> Plan:
        """The plan for what is handed out next."""
        return prepared(self._served, "plan").desk.course.engine.plan

    @property
    def progress(self) -> Pushed:
        """What is pushed so far."""
        return Pushed(0 if self._served is None else self._course.engine.samples)

    @property
    def skipped(self) -> int:
        """Pushes that were dropped."""
        if self._served is None:
            return 0
        engine = self._course.engine
        tallies = [*(member.tally for member in engine.members), *engine.gone.values()]
        return sum(tally.dropped for tally in tallies)

    def prepare(self, model: Any, optimizer: Any, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
        """Take the script's model and optimizer as those of the training."""
        given = self._first_given(self._served, model, optimizer, loader)
        settings, serving, events = self._settings, self._serving, self._events
        length = len(given.orders)
        if loader.drop_last:
            check_epoch(length, settings.global_batch)
            length -= length % settings.global_batch
        decides = Engine(settings.policy, serving.workers, settings.global_batch)
        self._course.resume(AsyncEngine.begin(self.mode, decides, length))
        saves = Saves(self._course, given, serving.save)
        recorder = None
        if settings.record is not None:
            recorder = Recorder(settings.record, decides, mode=str(self.mode), series=True)
        desk = Desk(self._course, given, recorder, events)
        self._served = ServedEpoch(desk, saves, serving)
        self._admission.open(desk)
        notice = momentum_notice(self.mode, given.optimizer, serving.workers)
        if notice:
            warnings.warn(notice, PoiseWarning, stacklevel=3)
        told = (None, (), [given.optimizer], False, 0)
        events.tell(Prepared(0, host_stamp(), *told))
        return model, optimizer, self._served

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs that are left."""
        course = prepared(self._served, "epochs").desk.course
        while (epoch := course.engine.epoch) < total and not course.engine.finished:
            yield epoch
            course.next_epoch(epoch)  # if the loop did not come to the loader

    def evaluation(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return the loader itself: the server evaluates alone."""
        check_loader(loader)
        return loader

    def micro_batches(self, batch: Any) -> Iterator[Part]:
        """Nothing is computed here."""
        raise OutOfOrder("a server computes no batches; take them from the prepared loader")

    def state_dict(self) -> Saved:
        """Return the place in the training, and what was learned of the workers."""
        return prepared(self._served, "state_dict").saves.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place, before the first pass."""
        prepared(self._served, "load_state_dict").saves.load_state_dict(state)

    def follow(self, schedule: Schedule) -> bool:
        """Let a schedule follow the samples before each update, whatever the script calls."""
        served = prepared(self._served, "a schedule")
        served.saves.add(schedule)
        served.desk.parameters.before_update.append(schedule.follow)
        return True

    def close(self) -> None:
        """Tell the workers that it is done, and let go of everything."""
        epoch = 0 if self._served is None else self._course.engine.epoch
        self._end(NoMore(epoch, done=True))
        self._events.tell(Closed(self.progress.samples, host_stamp()))

    def fail(self, error: BaseException) -> None:
        """Tell the workers why the server stops."""
        interrupted = isinstance(error, KeyboardInterrupt)
        why = "it was interrupted" if interrupted else f"{type(error).__name__}: {error}"
        self._end(why)

    def _end(self, said: Ending) -> None:
        """Tell the workers, and the user what is not saved; the first time only."""
        if self._course.ended is None and self._served is not None:
            self._served.saves.close()
        self._admission.end(said)


@dataclass(eq=False)
class ServedEpoch:
    """The server's loader: serves until every sample of the epoch is pushed, and yields nothing.

    It shows and saves in between.
    """

    desk: Desk
    saves: Saves
    serving: Serving
    _shown_s: float = field(default_factory=time.monotonic)
    _saved_s: float = field(default_factory=time.monotonic)

    def __len__(self) -> int:
        course = self.desk.course
        return steps_per_epoch(course.engine.length, course.global_batch, drop_last=False)

    def __iter__(self) -> Iterator[Any]:
        course = self.desk.course
        self.saves.begin()
        orders = self.desk.given.orders
        order = orders.at(course.engine.epoch)
        if order.length != len(orders):
            raise InvalidSetting(
                f"the sampler drew {order.length} samples and its length is {len(orders)}; "
                'a server hands out as many as that says: mend one of them, or use mode="sync"'
            )
        course.open(None if isinstance(orders, KeyedOrders) else order)
        while course.goes_on(closed=self.serving.closed):
            self.desk.events.raise_kept()
            self._show_and_save(_SHOW_S, self.serving.save_every_s)
        self.desk.parameters.follow()
        self._show_and_save(0.0, 0.0)
        return iter(())

    def _show_and_save(self, show_every_s: float, save_every_s: float) -> None:
        """Show and save what has not been shown and saved for so many seconds."""
        now_s = time.monotonic()
        if now_s - self._shown_s >= show_every_s:
            self._shown_s = now_s
            if self.serving.show is not None:
                self.serving.show(self.desk.service())
        if now_s - self._saved_s >= save_every_s:
            self.saves.save()
            self._saved_s = time.monotonic()
