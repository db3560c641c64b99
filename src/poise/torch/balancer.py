"""`Balancer`: exact training on unequal shares, in three lines."""

import atexit
import sys
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from os import PathLike
from typing import Any, TypeVar, overload

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from poise.core.noise import NoiseTrack
from poise.core.plain import check_state
from poise.core.plan import Plan
from poise.engine.modes import Async, Stale, Sync
from poise.policy import Policy
from poise.runtime.clocks import host_stamp
from poise.runtime.counts import CountFunction
from poise.runtime.events import Begun, Events
from poise.runtime.instruments import instruments
from poise.runtime.settings import SILENT_S, Idle
from poise.runtime.slicing import Slicer
from poise.runtime.training import Saved, Training
from poise.torch.asynchronous.role import ServerRole, WorkerRole, role_of
from poise.torch.asynchronous.server import Server
from poise.torch.asynchronous.worker import JoinedWorker
from poise.torch.micro import Part
from poise.torch.settings import TorchSettings
from poise.torch.synchronous import Synchronous

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Balancer:
    """Gives every worker its own share of each global batch, and keeps the training exact.

    The same script means the same training on one worker or many: each sample is used once per
    epoch, in one global order, and gradients are weighted so that they equal those of one
    process on the joined batch.
    """

    def __init__(
        self,
        global_batch: int,
        *,
        policy: str | Policy = "auto",
        mode: str | Sync | Async | Stale | None = None,
        adapt: tuple[int, int] | None = None,
        rate: str | None = None,
        scaler: Any = None,
        seed: int = 0,
        count: CountFunction | None = None,
        micro_batch: int | Sequence[int | None] | None = None,
        slicer: Slicer | None = None,
        idle: Idle = "empty",
        ddp: Mapping[str, Any] | None = None,
        comm_hook: Any = None,
        silent_s: float = SILENT_S,
        hang_s: float | None = None,
        record: str | PathLike[str] | None = None,
    ) -> None:
        """Join the process group that exists, or torchrun's, or a server, or train alone.

        Args:
            global_batch: samples per step, over all workers; with adapt, at the start.
            policy: how samples are split. "auto" learns each worker's speed while training and
                finds the fastest split; others are "even", "proportional", "lbbsp", "optperf",
                `Fixed([...])`, `Fixed({step: [...]})`, `Static([...])`, or an object of your own.
            mode: "sync": all workers take every step together. "async": a server applies each
                worker's gradient as it comes, and nobody waits. "stale:4", or `Stale(4)`: workers
                wait for one that is more than 4 steps behind. None: what the server that this
                process joins says, and without one "sync".
            adapt: the lowest and highest global batch. Within them it follows the gradient noise,
                and the learning rate, which is chosen for global_batch, follows it. None: the
                global batch stays, and the learning rate is the optimizer's.
            rate: how the learning rate follows: "adascale", "sqrt", "linear", "legw" or "none";
                None: "sqrt" for optimizers of Adam's kind, "adascale" for others.
            scaler: the GradScaler, if losses are scaled; used with adapt.
            seed: chooses the order of samples and their augmentation, together with the epoch.
            count: a function of a batch that returns what its mean loss is divided by, such as
                the number of tokens; None: the number of samples.
            micro_batch: the most samples that `micro_batches` puts into one part: one number for
                all workers or one for each; None: the whole local batch, unless memory is short.
            slicer: a function of (batch, start, stop) that returns some samples of a batch, for
                batches of an unusual form.
            idle: what a worker without a sample in a step gets: an "empty" batch, or "repeat":
                one sample twice, at weight 0, for models that cannot take an empty batch.
            ddp: options for DistributedDataParallel.
            comm_hook: a communication hook that averages, such as fp16_compress_hook, or a pair
                of its state and the hook.
            silent_s: seconds without a sign of life after which a worker counts as lost: its
                process is stopped, or its machine or link is gone.
            hang_s: seconds after which a worker that gives signs of life, and that others wait
                for, counts as hanging; None: 30 minutes.
            record: a file to which worker 0 writes one row per step. A record that exists is
                kept, and run.2.jsonl is written beside run.jsonl. None: nothing is written.
        """
        settings = TorchSettings.of(
            global_batch=global_batch,
            policy=policy,
            mode=mode,
            adapt=adapt,
            rate=rate,
            scaler=scaler,
            seed=seed,
            count=count,
            micro_batch=micro_batch,
            slicer=slicer,
            idle=idle,
            ddp=ddp,
            comm_hook=comm_hook,
            silent_s=silent_s,
            hang_s=hang_s,
            record=record,
        )
        events = Events()
        self._training = _begun(settings, events)
        self._over = False
        atexit.register(self._at_exit)
        # Forked children of multiprocessing end without atexit.
        self._finalizer = Finalize(None, self._at_exit, exitpriority=0)
        events.tell(Begun(0, host_stamp(), self))

    @property
    def worker(self) -> int:
        """This worker's number, from 0; with a server, that is 0 and its workers count from 1."""
        return self._training.worker

    @property
    def workers(self) -> int:
        """The number of workers; with a server, those that are there now."""
        return self._training.workers

    @property
    def plan(self) -> Plan:
        """The plan of the batch handed out last; before the first, the plan to start with.

        On worker 0, with a policy that has a speed model, it predicts by what is known now.
        """
        return self._training.plan

    @property
    def samples(self) -> int:
        """Samples consumed so far, over the whole training and all workers."""
        return self._training.progress.samples

    @property
    def effective_samples(self) -> float:
        """The same, each counted by what it teaches compared with one at the start.

        It grows by gain times the global batch of the start in every step; without adapt it
        equals samples.
        """
        return self._training.progress.effective_samples

    @property
    def noise(self) -> NoiseTrack | None:
        """What is known of the gradient noise, on worker 0 and with adapt; None elsewhere."""
        return self._training.noise

    @property
    def learning_rate_factor(self) -> float:
        """What the last step's learning rate was multiplied by, in the first parameter group."""
        return self._training.learning_rate_factor

    @property
    def skipped(self) -> int:
        """Steps whose gradient no optimizer used, as when a GradScaler finds it too large."""
        return self._training.skipped

    @overload
    def prepare(
        self, model: ModuleT, optimizer: OptimizerT, loader: DataLoader[Any]
    ) -> tuple[ModuleT, OptimizerT, Any]: ...

    @overload
    def prepare(
        self, model: ModuleT, optimizer: Sequence[OptimizerT], loader: DataLoader[Any]
    ) -> tuple[ModuleT, list[OptimizerT], Any]: ...

    @overload
    def prepare(
        self, model: Sequence[ModuleT], optimizer: OptimizerT, loader: DataLoader[Any]
    ) -> tuple[list[ModuleT], OptimizerT, Any]: ...

    @overload
    def prepare(
        self, model: Sequence[ModuleT], optimizer: Sequence[OptimizerT], loader: DataLoader[Any]
    ) -> tuple[list[ModuleT], list[OptimizerT], Any]: ...

    def prepare(self, model: Any, optimizer: Any, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
        """Return the model, the same optimizer, and a loader of this worker's shares.

        Several models or optimizers come as lists and are returned as lists. All workers call
        it together. Parameters and buffers start with worker 0's values.
        """
        return self._training.prepare(model, optimizer, loader)

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs from 0 to total - 1, after a resume over the rest of them."""
        return self._training.epochs(total)

    def evaluation(self, loader: DataLoader[Any]) -> Any:
        """Return a loader of this worker's shares of each batch of an evaluation loader.

        Together the workers see every sample once, in the loader's order; all of them get the
        same number of batches, some of which may be empty. With a server, it sees all of them,
        and its workers none.
        """
        return self._training.evaluation(loader)

    def micro_batches(self, batch: Any) -> Iterator[Part]:
        """Iterate over parts of the batch under way; `with part as (x, y):` gives its samples.

        The gradient of the whole is reduced once, after the last part. If a part does not fit
        into memory, the rest goes on in smaller ones, on this worker alone.
        """
        return self._training.micro_batches(batch)

    def mean(self, value: float | Tensor, count: float) -> float:
        """Return the mean over all workers, where this worker's value counts count times.

        All workers call it together. A value whose count is 0 contributes nothing, NaN included.
        With a server nothing is called together: each process gets its own value back.
        """
        return self._training.mean(value, count)

    def state_dict(self) -> Saved:
        """Return the place in the training; on worker 0 also what was learned of speeds.

        Save worker 0's. It holds for any number of workers: the samples that are not yet consumed
        follow, and speeds are reused by kind of device. The place in a stream is each worker's
        own.
        """
        return self._training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place. Load it on every worker, after prepare."""
        check_state(state)
        self._training.load_state_dict(state)

    def close(self) -> None:
        """Wait for the other workers to be done, and free what this Balancer holds.

        Runs by itself at the end of the script.
        """
        self._end(None)

    def __enter__(self) -> "Balancer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._end(error)  # the process may live on, and nobody must wait for it

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None) or sys.exc_info()[1]
        regular = isinstance(error, SystemExit) and not error.code
        self._end(None if regular else error)

    def _end(self, error: BaseException | None) -> None:
        """End the training, or let it fail; the first time only."""
        if self._over:
            return
        self._over = True
        atexit.unregister(self._at_exit)
        self._finalizer.cancel()
        if error is None:
            self._training.close()
        else:
            self._training.fail(error)


def _begun(settings: TorchSettings, events: Events) -> Training:
    """Begin the kind of training that the settings and the environment ask for."""
    for instrument in instruments():
        settings = instrument.settings(settings)
        instrument.listen(events)
    match role_of(settings.mode):
        case ServerRole() as role:
            return Server(role, settings, events)
        case WorkerRole() as role:
            return JoinedWorker(role, settings, events)
        case None:
            return Synchronous(settings, events)
