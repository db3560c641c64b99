"""Synchronous training: every step one gradient, summed over all workers by their counts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from poise.core.noise import NoiseTrack
from poise.core.plan import Plan
from poise.engine.progress import Progress
from poise.errors import InvalidSetting, OutOfOrder
from poise.runtime.control import checked_mean
from poise.runtime.events import Events, Prepared, Preparing
from poise.runtime.recording import Recording
from poise.runtime.saved import load_state, saved_state
from poise.runtime.session import Session
from poise.runtime.settings import most_samples
from poise.runtime.training import Saved, Schedule
from poise.torch.checks import handed_in, prepared
from poise.torch.gloo import disconnection, is_loss
from poise.torch.groups import Groups
from poise.torch.loader import ShareLoader, lead
from poise.torch.micro import Part
from poise.torch.preparation import Built, build, evaluation_loader
from poise.torch.rates import saved_ramps
from poise.torch.settings import TorchSettings
from poise.torch.stream import StreamLoader


class Synchronous:
    """A training in which all workers take every step together."""

    def __init__(self, settings: TorchSettings, events: Events) -> None:
        """Join the process group that exists, or torchrun's, or train alone."""
        self._settings = settings
        self._groups = groups = Groups(settings.hang_s, settings.silent_s)
        self._closed = False
        self._built: Built | None = None
        try:
            self._session = Session(settings, groups.generation, groups.rendezvous, events)
        except BaseException:
            groups.leave()
            raise
        try:
            self._most_samples = most_samples(settings.micro_batch, self.worker, self.workers)
            if settings.record is not None and self.worker == 0:
                Recording(settings.record, self._session.engine).listen(events)
        except BaseException as error:
            self.fail(error)
            raise

    @property
    def worker(self) -> int:
        """This worker's number, from 0."""
        return self._session.generation.worker

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self._session.generation.workers

    @property
    def plan(self) -> Plan:
        """The plan of the batch handed out last; on worker 0 it predicts by what is known now."""
        session = self._session
        forecast = session.exchange.forecast() if session.is_prepared else None
        return session.plan if forecast is None else replace(session.plan, forecast=forecast)

    @property
    def progress(self) -> Progress:
        """Samples are consumed when their gradient is reduced."""
        return self._session.progress

    @property
    def noise(self) -> NoiseTrack | None:
        """What is known of the gradient noise, on worker 0 and with adapt; None elsewhere."""
        if self.worker or not self._session.is_prepared:
            return None
        adapted = self._session.exchange.engine.adapted
        return None if adapted is None else adapted.noise

    @property
    def learning_rate_factor(self) -> float:
        """What the last step's learning rate was multiplied by, in the first parameter group."""
        return 1.0 if self._built is None else self._built.updates.learning_rate_factor

    @property
    def skipped(self) -> int:
        """Steps whose gradient no optimizer used, as when a GradScaler finds it too large."""
        self._session.settle()
        return self._session.progress.skipped

    def prepare(self, model: Any, optimizer: Any, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
        """Check what is handed in, agree with the other workers, and build what trains."""
        if self._built is not None:
            raise OutOfOrder(
                "prepare was called before; make one Balancer per training, and pass several "
                "models or optimizers together: prepare([model, other], [opt, other_opt], loader)"
            )
        session, settings = self._session, self._settings
        session.events.train_here()
        session.events.tell(session.stamped(Preparing))
        handed = handed_in(session, settings, model, optimizer, loader)
        built = self._built = build(session, settings, self._groups, handed, self._most_samples)
        told = (built.models, handed.optimizers, handed.orders is None, lead(loader))
        session.events.tell(session.stamped(Prepared, session.peers, *told))
        return (
            built.models if isinstance(model, list | tuple) else built.models[0],
            handed.optimizers if isinstance(optimizer, list | tuple) else optimizer,
            built.loader,
        )

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs that are left."""
        return self._session.epochs(total)

    def evaluation(self, loader: DataLoader[Any]) -> ShareLoader | StreamLoader:
        """Return a loader of this worker's shares; all workers get the same number of batches."""
        return evaluation_loader(self._session, loader)

    def micro_batches(self, batch: Any) -> Iterator[Part]:
        """Iterate over parts of the batch under way; their gradient is reduced once."""
        if self._settings.ddp.get("static_graph"):
            raise InvalidSetting(
                "ddp={'static_graph': True} does not go with micro_batches: it counts every "
                "backward from the first one on and would miss later sums in silence; leave "
                "static_graph out"
            )
        return prepared(self._built, "micro_batches").micro.of(batch)

    def mean(self, value: Any, count: float) -> float:
        """Return the mean over all workers, who call it together."""
        if self._closed:
            raise OutOfOrder("mean was called after close; call it before")
        return self._session.peers.control.mean(*checked_mean(value, count))

    def state_dict(self) -> Saved:
        """Return the place in the training; on worker 0 also what was learned of speeds."""
        ready = prepared(self._built, "state_dict")
        saved = saved_state(self._session, ready.orders, ready.stream)
        if self._settings.policy.online:
            saved["rates"] = ready.updates.saved
        return saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place."""
        ready = prepared(self._built, "load_state_dict")
        ramps = saved_ramps(state)
        load_state(state, self._session, ready.orders, ready.stream)
        ready.updates.resume(ramps)

    def follow(self, schedule: Schedule) -> bool:
        """Leave it to the user's own loop, which steps it."""
        return False

    def close(self) -> None:
        """Wait for the other workers to be done, and free what this training holds."""
        if self._ending():
            self._session.close(self._groups.leave)

    def fail(self, error: BaseException) -> None:
        """Tell the others why this worker stops, and leave the groups, which they notice."""
        if not self._ending():
            return
        if isinstance(error, RuntimeError) and is_loss(error):
            # A call of the script's own to torch.distributed, which another worker keeps from
            # going on: that one is to blame.
            self._session.peers.liveness.lost("a call of the script", disconnection(error))
        self._session.fail(error, self._groups.leave)

    def _ending(self) -> bool:
        """Let go of optimizers and models; False: that was done before."""
        if self._closed:
            return False
        self._closed = True
        if self._built is not None:
            self._built.updates.release()
            for link in self._built.links:
                link.release()
        return True
