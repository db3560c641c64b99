"""`Balancer`: exact training on unequal shares, in three lines."""

import atexit
import sys
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from poise.core.order import Order, check_seed
from poise.core.plan import Plan
from poise.engine.bsp import Engine
from poise.engine.progress import Progress
from poise.errors import InvalidSetting, OutOfOrder, PoiseError, PoiseWarning, StateMismatch
from poise.policy import Policy, policy_named
from poise.torch.checks import (
    check_epoch,
    check_loader,
    check_model,
    check_optimizer,
    is_shuffled,
    model_facts,
)
from poise.torch.cluster import Cluster
from poise.torch.control import Control
from poise.torch.exchange import Exchange
from poise.torch.liveness import Liveness
from poise.torch.loader import EvaluationSource, Idle, ShareLoader, TrainingSource, lead
from poise.torch.module import SharedModule, check_options
from poise.torch.run import Run

_STATE_VERSION = 1

OptimizerT = TypeVar("OptimizerT", bound=Optimizer)


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
        policy: str | Policy = "even",
        seed: int = 0,
        idle: Idle = "empty",
        ddp: Mapping[str, Any] | None = None,
        hang_s: float | None = None,
    ) -> None:
        """Join the process group that exists, or torchrun's, or train alone.

        Args:
            global_batch: samples per step, over all workers.
            policy: "even", `Fixed([...])`, `Fixed({step: [...]})`, or a policy object.
            seed: chooses the order of samples, together with the epoch.
            idle: what a worker without a sample in a step gets: an "empty" batch, or "repeat":
                one sample twice, at weight 0, for models that cannot take an empty batch.
            ddp: options for DistributedDataParallel.
            hang_s: seconds after which a worker that others wait for counts as hanging;
                None: 30 minutes, and for gradients in a group of your own its own limit.
        """
        _check_settings(global_batch, idle, hang_s)
        check_seed(seed)
        check_options(ddp or {})
        self._policy = policy_named(policy) if isinstance(policy, str) else _checked(policy)
        self._global_batch = global_batch
        self._seed = seed
        self._idle = idle
        self._ddp_options = dict(ddp or {})
        self._cluster = Cluster.join(hang_s)
        self._liveness = Liveness(self._cluster.worker, self._cluster.workers, self._cluster.store)
        self._control = Control(self._cluster, self._liveness)
        self._closed = False
        self._order: Order | None = None
        self._model: SharedModule | None = None
        self._optimizer_hook: RemovableHandle | None = None
        atexit.register(self._at_exit)
        engine = Engine(self._policy, self._cluster.workers, global_batch)
        try:
            timetable, self._engine = engine.start()
        except PoiseError as error:
            self.__exit__(type(error), error, None)
            raise
        self._first_plans = timetable
        self._run = Run(self._cluster, self._liveness, timetable, timetable.at(0))

    @property
    def worker(self) -> int:
        """This worker's number, from 0."""
        return self._cluster.worker

    @property
    def workers(self) -> int:
        """The number of workers."""
        return self._cluster.workers

    @property
    def plan(self) -> Plan:
        """The plan of the batch handed out last; before the first, the plan to start with."""
        return self._run.plan

    def prepare(
        self, model: nn.Module, optimizer: OptimizerT, loader: DataLoader[Any]
    ) -> tuple[SharedModule, OptimizerT, ShareLoader]:
        """Return the model, the same optimizer, and a loader of this worker's shares.

        All workers call it together. Parameters and buffers start with worker 0's values.
        """
        if self._order is not None:
            raise OutOfOrder("prepare was called before; make one Balancer per training")
        check_model(model)
        check_optimizer(optimizer, model)
        order = Order(length=check_loader(loader), seed=self._seed, shuffled=is_shuffled(loader))
        check_epoch(order.length, self._global_batch, drop_last=loader.drop_last)
        self._agree(model, order, loader)
        self._say_once(model, loader)
        self._order = order
        leads = [int(row[0]) for row in self._control.table([lead(loader)], "prepare")]
        exchange = Exchange(self._run, self._engine, max(leads))
        source = TrainingSource(
            self._run,
            exchange,
            partial(_order_of_epoch, order),
            global_batch=self._global_batch,
            drop_last=loader.drop_last,
        )
        with self._liveness.together("prepare"):
            self._model = SharedModule(model, self._run, self._ddp_options)
        self._optimizer_hook = optimizer.register_step_post_hook(self._after_optimizer_step)
        return self._model, optimizer, ShareLoader(loader, source, self.worker, self._idle)

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs from 0 to total - 1, after a resume over the rest of them."""
        while (epoch := self._run.progress.epoch) < total:
            yield epoch
            if self._run.progress.epoch == epoch:  # the loop left the loader before its end
                self._run.progress = self._run.progress.next_epoch()

    def evaluation(self, loader: DataLoader[Any]) -> ShareLoader:
        """Return a loader of this worker's shares of each batch of an evaluation loader.

        Together the workers see every sample once, in the data set's order; all of them get the
        same number of batches, some of which may be empty.
        """
        length = check_loader(loader)
        assert loader.batch_size is not None
        source = EvaluationSource(
            lambda: self.plan,
            length,
            global_batch=loader.batch_size,
            drop_last=loader.drop_last,
        )
        return ShareLoader(loader, source, self.worker, "empty")

    def mean(self, value: float | Tensor, count: float) -> float:
        """Return the mean over all workers, where this worker's value counts count times.

        All workers call it together. A value whose count is 0 contributes nothing, NaN included.
        """
        if self._closed:
            raise OutOfOrder("mean was called after close; call it before")
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidSetting(
                f"mean got {value!r}; it takes a number or a tensor of one element"
            ) from None
        return self._control.mean(number, float(count))

    def state_dict(self) -> dict[str, int | str]:
        """Return the place in the training; the same on all workers.

        It holds for any number of workers: the samples that are not yet consumed follow.
        """
        order = self._prepared("state_dict")
        progress = self._run.progress
        if progress.unapplied:
            raise OutOfOrder(
                f"state_dict was called between backward and optimizer.step() of step "
                f"{progress.step - 1}, when the samples are consumed but not learned from; "
                "call it after optimizer.step()"
            )
        return {
            "version": _STATE_VERSION,
            "epoch": progress.epoch,
            "position": progress.position,
            "step": progress.step,
            "seed": self._seed,
            "samples": order.length,
            "order": order.digest(),
        }

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on from a saved place. Load it on every worker, after prepare."""
        order = self._prepared("load_state_dict")
        expected: dict[str, int | str] = {
            "version": _STATE_VERSION,
            "samples": order.length,
            "seed": self._seed,
            "order": order.digest(),
        }
        for key, value in expected.items():
            if state.get(key) != value:
                raise StateMismatch(
                    f"the state has {key}={state.get(key)!r} and this training {key}={value!r}; "
                    "resume with the data set, shuffling and seed it was saved with"
                )
        epoch, position, step = (_whole(state, key) for key in ("epoch", "position", "step"))
        if position > order.length:
            raise StateMismatch(
                f"the state has position={position} in a data set of {order.length} samples; "
                "it is damaged, load another one"
            )
        self._run.progress = Progress(epoch=epoch, position=position, step=step)
        self._run.plan = self._first_plans.at(step)

    def close(self) -> None:
        """Wait for the other workers to be done, and free what this Balancer holds.

        Runs by itself at the end of the script.
        """
        if self._release():
            self._liveness.finish()
            self._leave()

    def __enter__(self) -> "Balancer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif self._fail(error):
            self._leave()  # the process may live on, and the others must not wait for it

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is None:
            self.close()
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> bool:
        """Tell the others why this worker stops; True the first time."""
        first = self._release()
        if first:
            self._liveness.fail(f"{type(error).__name__}: {error}")
        return first

    def _leave(self) -> None:
        if self._model is not None:
            self._model.release()
        self._cluster.leave()

    def _release(self) -> bool:
        """Let go of hooks; True the first time."""
        if self._closed:
            return False
        self._closed = True
        atexit.unregister(self._at_exit)
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        return True

    def _after_optimizer_step(self, *_: Any) -> None:
        if self._run.backwards > self._run.reductions:
            raise OutOfOrder(
                f"{self._run.backwards} backwards reached the model since the last batch, but "
                f"{self._run.reductions} of them were summed over the workers; run one backward "
                "for each call of the prepared model, model(x)"
            )
        self._run.progress = self._run.progress.applied()

    def _prepared(self, call: str) -> Order:
        if self._order is None:
            raise OutOfOrder(f"{call} needs the data set; call prepare first")
        return self._order

    def _agree(self, model: nn.Module, order: Order, loader: DataLoader[Any]) -> None:
        facts = {
            "global_batch": self._global_batch,
            "seed": self._seed,
            "idle": self._idle,
            "the policy": type(self._policy).__name__,
            "the policy's first plans": [
                (p.start_step, p.split) for p in self._run.timetable.plans
            ],
            "the length of the data set": order.length,
            "the order of the data set": order.digest(),
            "drop_last": loader.drop_last,
            **model_facts(model),
        }
        self._control.agree(facts, "prepare")

    def _say_once(self, model: nn.Module, loader: DataLoader[Any]) -> None:
        if self.worker != 0:
            return
        if loader.batch_size != self._global_batch:
            warnings.warn(
                f"the loader's batch_size={loader.batch_size} is not used: each step takes "
                f"global_batch={self._global_batch} samples over all workers",
                PoiseWarning,
                stacklevel=3,
            )
        if any(isinstance(layer, _BatchNorm) for layer in model.modules()) and self.workers > 1:
            warnings.warn(
                "the model has BatchNorm, which normalizes each worker's local batch by itself, "
                "so the training is not the same as on one machine; running statistics are "
                "merged by share in every step. A local batch of one sample can be too small for "
                "it: drop_last=True leaves small last batches out",
                PoiseWarning,
                stacklevel=3,
            )


def _order_of_epoch(order: Order, epoch: int) -> Order:
    return Order(length=order.length, seed=order.seed, epoch=epoch, shuffled=order.shuffled)


def _whole(state: Mapping[str, int | str], key: str) -> int:
    value = state.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise StateMismatch(
            f"the state has {key}={value!r}, which is not a whole number from 0; "
            "it is damaged, load another one"
        )
    return value


def _checked(policy: object) -> Policy:
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise InvalidSetting(
            f"policy={policy!r} is not a policy; "
            'use a name such as "even", Fixed([...]), or an object with init and update'
        )
    return policy


def _check_settings(global_batch: object, idle: object, hang_s: object) -> None:
    if isinstance(global_batch, bool) or not isinstance(global_batch, int) or global_batch < 1:
        raise InvalidSetting(
            f"global_batch={global_batch!r} is not a number of samples; give a whole number from 1"
        )
    if idle not in ("empty", "repeat"):
        raise InvalidSetting(f'idle={idle!r} is unknown; use "empty" or "repeat"')
    number = isinstance(hang_s, int | float) and not isinstance(hang_s, bool)
    if hang_s is not None and not (number and 0 < hang_s < float("inf")):  # type: ignore[operator]
        raise InvalidSetting(f"hang_s={hang_s!r} is not a time; give seconds above 0, or None")
