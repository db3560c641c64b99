"""Synchronous training: every step one gradient, summed over all workers by their counts."""

import socket
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from poise.core.noise import NoiseTrack
from poise.core.plan import Plan
from poise.engine.bsp import Engine
from poise.errors import InvalidSetting, OutOfOrder, PoiseError, PoiseWarning
from poise.records import Recorder
from poise.torch.checks import (
    as_list,
    check_all_used,
    check_epoch,
    check_loader,
    check_models,
    check_optimizers,
    check_range,
    is_stream,
    length_of,
    model_facts,
)
from poise.torch.clocks import clock_of
from poise.torch.cluster import Cluster
from poise.torch.compiling import is_compiled
from poise.torch.control import Control
from poise.torch.counts import Counts
from poise.torch.exchange import Exchange
from poise.torch.learned import Known, device_kind
from poise.torch.liveness import Liveness
from poise.torch.loader import EvaluationSource, ShareLoader, TrainingSource, lead
from poise.torch.memory import Guard, memory_of
from poise.torch.meter import Meter
from poise.torch.micro import MicroBatches, Part
from poise.torch.module import SharedModule
from poise.torch.norms import Norms
from poise.torch.orders import Orders, orders_of
from poise.torch.rates import Rates, saved_ramps
from poise.torch.run import Run
from poise.torch.saved import Saved, load_place, saved_place
from poise.torch.settings import Settings, most_samples
from poise.torch.stream import EvaluationPace, StreamLoader, TrainingPace


class Synchronous:
    """A training in which all workers take every step together."""

    def __init__(self, settings: Settings) -> None:
        """Join the process group that exists, or torchrun's, or train alone."""
        self._settings = settings
        self._adapt = settings.adapt
        self._inner = settings.inner
        self._policy = settings.policy
        self._global_batch = settings.global_batch
        self._cluster = Cluster.join(settings.hang_s)
        self._liveness = Liveness(self._cluster.worker, self._cluster.workers, self._cluster.store)
        self._control = Control(self._cluster, self._liveness)
        self._closed = False
        self._models: list[SharedModule] = []
        self._orders: Orders | None = None
        self._loader: ShareLoader | StreamLoader | None = None
        self._optimizer_hooks: list[RemovableHandle] = []
        self._rates: list[Rates] = []
        """One for each optimizer, if the global batch may move."""
        self._recorder: Recorder | None = None
        self._exchange: Exchange | None = None
        self._kinds: list[str] = []
        """The kinds of all workers' devices."""
        engine = Engine(self._policy, self._cluster.workers, settings.global_batch, self._adapt)
        try:
            self._most_samples = most_samples(settings.micro_batch, self.worker, self.workers)
            timetable, self._engine = engine.start()
            if settings.record is not None and self.worker == 0:
                self._recorder = Recorder(settings.record, engine)
        except PoiseError as error:
            self.fail(error)
            raise
        self._first_plans = timetable
        counts = Counts(self._cluster, self._liveness, settings.count)
        self._run = Run(
            self._cluster,
            self._liveness,
            timetable,
            timetable.at(0),
            counts,
            start_batch=settings.global_batch,
        )

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
        """The plan of the batch handed out last; before the first, the plan to start with.

        On worker 0, with a policy that has a speed model, it predicts by what is known now.
        """
        forecast = None if self._exchange is None else self._exchange.forecast()
        return self._run.plan if forecast is None else replace(self._run.plan, forecast=forecast)

    @property
    def samples(self) -> int:
        """Samples consumed so far, over the whole training and all workers."""
        return self._run.progress.samples

    @property
    def effective_samples(self) -> float:
        """The same, each counted by what it teaches compared with one at the start.

        It grows by gain times the global batch of the start in every step; without adapt it
        equals samples.
        """
        return self._run.progress.effective_samples

    @property
    def noise(self) -> NoiseTrack | None:
        """What is known of the gradient noise, on worker 0 and with adapt; None elsewhere."""
        adapted = None if self._exchange is None else self._exchange.engine.adapted
        return None if adapted is None or self.worker else adapted.noise

    @property
    def learning_rate_factor(self) -> float:
        """What the last step's learning rate was multiplied by, in the first parameter group."""
        return self._rates[0].factor if self._rates else 1.0

    @property
    def skipped(self) -> int:
        """Steps whose gradient no optimizer used, as when a GradScaler finds it too large."""
        self._run.settle()
        return self._run.progress.skipped

    def prepare(self, model: Any, optimizer: Any, loader: DataLoader[Any]) -> tuple[Any, Any, Any]:
        """Return the model, the same optimizer, and a loader of this worker's shares.

        Several models or optimizers come as lists and are returned as lists. All workers call
        it together. Parameters and buffers start with worker 0's values.
        """
        if self._loader is not None:
            raise OutOfOrder(
                "prepare was called before; make one Balancer per training, and pass several "
                "models or optimizers together: prepare([model, other], [opt, other_opt], loader)"
            )
        models = as_list(model)
        optimizers = as_list(optimizer)
        check_models(models)
        if self._inner is not None and self._inner.state is not None and len(models) > 1:
            raise InvalidSetting(
                "comm_hook has a state, which remembers buckets by their number, and would mix "
                "those of several models; use a hook without a state, or one model"
            )
        if self._adapt is not None and len(models) > 1:
            raise InvalidSetting(
                "adapt measures the noise of one gradient, and several models have several; "
                "leave adapt out, or train them as one module"
            )
        check_optimizers(optimizers, models)
        check_loader(loader)
        orders = self._orders_of(loader)
        self._agree(models, loader, orders)
        self._say_once(models, loader)
        self._run.compiles = any(is_compiled(each) for each in models)
        device = next(p.device for each in models for p in each.parameters() if p.requires_grad)
        self._loader = self._training_loader(loader, orders, device)
        with self._liveness.together("prepare"):
            self._models = [
                SharedModule(each, self._run, self._settings.ddp, self._inner) for each in models
            ]
        self._trained = [p for each in models for p in each.parameters() if p.requires_grad]
        self._micro = MicroBatches(
            self._run,
            [(each.module, each._link) for each in self._models],
            most_samples=self._most_samples,
            slicer=self._settings.slicer,
            guard=self._guard,
        )
        if self._adapt is not None:
            check_all_used(self._trained, optimizers)
        for each in optimizers:
            self._optimizer_hooks.append(each.register_step_post_hook(self._after_optimizer_step))
            if self._adapt is not None:
                self._follow(each)
        return (
            self._models if isinstance(model, list | tuple) else self._models[0],
            optimizers if isinstance(optimizer, list | tuple) else optimizer,
            self._loader,
        )

    def epochs(self, total: int) -> Iterator[int]:
        """Iterate over the epochs from 0 to total - 1, after a resume over the rest of them."""
        while (epoch := self._run.progress.epoch) < total:
            yield epoch
            if self._run.progress.epoch == epoch:  # the loop left the loader before its end
                self._run.progress = self._run.progress.next_epoch()

    def evaluation(self, loader: DataLoader[Any]) -> ShareLoader | StreamLoader:
        """Return a loader of this worker's shares of each batch of an evaluation loader.

        Together the workers see every sample once, in the loader's order; all of them get the
        same number of batches, some of which may be empty.
        """
        check_loader(loader)
        assert loader.batch_size is not None
        if is_stream(loader):
            pace = EvaluationPace(self._run, loader.batch_size)
            return StreamLoader(loader, pace, self._control, self._settings.slicer)
        source = EvaluationSource(
            self._run,
            orders_of(loader, length_of(loader), self._settings.seed, self._control),
            global_batch=loader.batch_size,
            drop_last=loader.drop_last,
        )
        return self._share_loader(loader, source)

    def micro_batches(self, batch: Any) -> Iterator[Part]:
        """Iterate over parts of the batch under way; `with part as (x, y):` gives its samples.

        The gradient of the whole is reduced once, after the last part. If a part does not fit
        into memory, the rest goes on in smaller ones, on this worker alone.
        """
        self._prepared("micro_batches")
        if self._settings.ddp.get("static_graph"):
            raise InvalidSetting(
                "ddp={'static_graph': True} does not go with micro_batches: it counts every "
                "backward from the first one on and would miss later sums in silence; leave "
                "static_graph out"
            )
        return self._micro.of(batch)

    def mean(self, value: float | Tensor, count: float) -> float:
        """Return the mean over all workers, where this worker's value counts count times.

        All workers call it together. A value whose count is 0 contributes nothing, NaN included.
        """
        if self._closed:
            raise OutOfOrder("mean was called after close; call it before")
        try:
            number = float(value.detach() if isinstance(value, Tensor) else value)
        except (TypeError, ValueError, RuntimeError):
            raise InvalidSetting(
                f"mean got {value!r}; it takes a number or a tensor of one element"
            ) from None
        return self._control.mean(number, float(count))

    def state_dict(self) -> Saved:
        """Return the place in the training; on worker 0 also what was learned of speeds.

        Save worker 0's. It holds for any number of workers: the samples that are not yet consumed
        follow, and speeds are reused by kind of device. The place in a stream is each worker's
        own.
        """
        loader = self._prepared("state_dict")
        self._run.settle()
        place = saved_place(self._run, self._orders, loader, self._settings.seed)
        if not self._policy.online:
            return place
        assert self._exchange is not None
        return {
            **place,
            "policy": self._policy_name,
            "split": list(self._run.plan.split),
            "gain": self._run.plan.gain,
            "rates": [each.saved() for each in self._rates],
            "kinds": self._kinds,
            "engine": self._exchange.engine.state_dict() if self.worker == 0 else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved place. Load it on every worker, after prepare."""
        loader = self._prepared("load_state_dict")
        known = None
        if self._policy.online:
            known = Known.of(state, self._policy_name, self._engine, self._kinds)
        ramps = saved_ramps(state)
        load_place(state, self._run, self._orders, loader, self._settings.seed)
        step = self._run.progress.step
        timetable = self._first_plans
        if known is not None and known.split is not None:
            plan = Plan(known.split, step, known.gain, why="as before the resume")
            timetable = timetable.announce(plan)
        elif known is not None and known.global_batch != self._global_batch:
            scaled = timetable.at(step).scaled(known.global_batch)
            why = "the global batch as before the resume"
            timetable = timetable.announce(Plan(scaled.split, step, known.gain, why=why))
        assert self._exchange is not None
        self._exchange.resume(step, known)
        self._run.timetable = timetable
        self._run.plan = timetable.at(step)
        for rates, way in zip(self._rates, ramps, strict=False):
            rates.resume(way)

    def follow(self, schedule: Any) -> bool:
        """Leave it to the user's own loop, which steps it."""
        return False

    def close(self) -> None:
        """Wait for the other workers to be done, and free what this training holds."""
        if self._release():
            self._liveness.finish()
            if self._exchange is not None:
                self._exchange.finish()
            self._leave()

    def fail(self, error: BaseException, *, leave: bool = True) -> None:
        """Tell the others why this worker stops.

        A process that lives on leaves the groups, so that the others do not wait for it.
        """
        if self._release():
            self._liveness.fail(f"{type(error).__name__}: {error}")
            if leave:
                self._leave()

    def _leave(self) -> None:
        for model in self._models:
            model.release()
        if self._recorder is not None:
            self._recorder.close()
        self._cluster.leave()

    def _release(self) -> bool:
        """Let go of hooks; True the first time."""
        if self._closed:
            return False
        self._closed = True
        for hook in self._optimizer_hooks:
            hook.remove()
        for rates in self._rates:
            rates.restore()
        return True

    def _follow(self, optimizer: Optimizer) -> None:
        """Let an optimizer's learning rates follow the global batch."""
        rates = Rates(optimizer, self._settings.rule, self._global_batch, lambda: self._run.plan)
        self._rates.append(rates)
        self._optimizer_hooks.append(optimizer.register_step_pre_hook(self._before_optimizer_step))
        self._optimizer_hooks += rates.hooks()

    def _before_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        assert self._run.norms is not None
        self._run.norms.used(optimizer)

    def _after_optimizer_step(self, *_: Any) -> None:
        if self._run.meter is not None:
            self._run.meter.updated()
        try:
            self._check_reduced()
        except OutOfOrder:
            if any(not parameter.requires_grad for parameter in self._trained):
                raise OutOfOrder(
                    "some parameters were frozen after prepare, and DistributedDataParallel "
                    "waits for their gradients; freeze them before, or use "
                    'Balancer(..., ddp={"find_unused_parameters": True})'
                ) from None
            raise

    def _check_reduced(self) -> None:
        """Raise unless the gradient that an optimizer used is that of the global batch."""
        if self._micro.unfinished:
            raise OutOfOrder(
                "the loop over balancer.micro_batches(batch) was left before its last part, so "
                "its gradient is not summed over the workers; take all parts"
            )
        for tally in self._run.tallies:
            if tally.backwards > tally.reduced:
                raise OutOfOrder(
                    f"{tally.backwards} backwards reached the model since the last batch, but "
                    f"{tally.reduced} of them were summed over the workers; run one backward "
                    "for each call of the prepared model, model(x)"
                )
        self._run.progress = self._run.progress.applied()
        if self._most_samples is not None and not self._micro.used_for(self._run.progress.batch):
            raise OutOfOrder(
                f"micro_batch={self._most_samples} is set, but the batch did not go through "
                "`for part in balancer.micro_batches(batch):`; use it, or leave micro_batch out"
            )

    @property
    def _policy_name(self) -> str:
        return type(self._policy).__name__

    def _prepared(self, call: str) -> ShareLoader | StreamLoader:
        if self._loader is None:
            raise OutOfOrder(f"{call} needs the data set; call prepare first")
        return self._loader

    def _orders_of(self, loader: DataLoader[Any]) -> Orders | None:
        """Return the orders of the epochs; None for a stream."""
        if is_stream(loader):
            return None
        orders = orders_of(loader, length_of(loader), self._settings.seed, self._control)
        if loader.drop_last:
            check_epoch(len(orders), self._global_batch)
        if self._adapt is not None:
            check_range(len(orders), self._adapt.highest)
        return orders

    def _training_loader(
        self, loader: DataLoader[Any], orders: Orders | None, device: torch.device
    ) -> ShareLoader | StreamLoader:
        self._orders = orders
        meter = self._meter(device, loads_itself=loader.num_workers == 0)
        if self._adapt is not None:
            self._run.norms = Norms(
                clock_of(device),
                device,
                worker=self.worker,
                workers=self.workers,
                scaler=self._settings.scaler,
            )
        table = self._control.table([lead(loader), meter.lag], "prepare")
        leads, lags = zip(*table, strict=True)
        self._exchange = exchange = Exchange(
            self._run,
            self._engine,
            int(max(leads)),
            meter,
            lag=int(max(lags)),
            recorded=self._settings.recorded,
            recorder=self._recorder,
        )
        if orders is None:
            pace = TrainingPace(self._run, exchange)
            return StreamLoader(loader, pace, self._control, self._settings.slicer)
        source = TrainingSource(
            self._run, exchange, orders, drop_last=loader.drop_last, idle=self._settings.idle
        )
        return self._share_loader(loader, source)

    def _meter(self, device: torch.device, *, loads_itself: bool) -> Meter:
        hosts = self._control.texts(socket.gethostname(), "prepare")
        self._kinds = self._control.texts(device_kind(device), "prepare")
        self._guard = Guard(memory_of(device, sharers=hosts.count(hosts[self.worker])))
        return Meter(clock_of(device), self._guard, self._waited_s, loads_itself=loads_itself)

    def _waited_s(self) -> float:
        return self._liveness.waited_s

    def _share_loader(
        self, loader: DataLoader[Any], source: TrainingSource | EvaluationSource
    ) -> ShareLoader:
        seed, slicer = self._settings.seed, self._settings.slicer
        return ShareLoader(loader, source, seed=seed, slicer=slicer)

    def _agree(
        self, models: Sequence[nn.Module], loader: DataLoader[Any], orders: Orders | None
    ) -> None:
        plans = [(plan.start_step, plan.split) for plan in self._run.timetable.plans]
        facts = {
            "global_batch": self._global_batch,
            "adapt": self._adapt,
            "rate": self._settings.rule,
            "the use of scaler": self._settings.scaler is not None,
            "seed": self._settings.seed,
            "idle": self._settings.idle,
            "the policy": self._policy_name,
            "the policy's first plans": plans,
            "the use of count": self._run.counts.by_function,
            "the use of comm_hook": self._inner is not None,
            "the use of record": self._settings.recorded,
            "the kind of data set": "a stream" if orders is None else "a map",
            **{
                f"the {name} of the data set": value
                for name, value in ({} if orders is None else orders.identity()).items()
            },
            "drop_last": loader.drop_last,
            "the number of models": len(models),
        }
        for number, model in enumerate(models):
            facts.update(model_facts(model, f" of model {number}" if len(models) > 1 else ""))
        self._control.agree(facts, "prepare")

    def _say_once(self, models: Sequence[nn.Module], loader: DataLoader[Any]) -> None:
        if self.worker != 0:
            return
        if loader.batch_size != self._global_batch:
            warnings.warn(
                f"the loader's batch_size={loader.batch_size} is not used: each step takes "
                f"global_batch={self._global_batch} samples over all workers",
                PoiseWarning,
                stacklevel=3,
            )
        layers = [layer for model in models for layer in model.modules()]
        if any(isinstance(layer, SyncBatchNorm) for layer in layers) and self.workers > 1:
            warnings.warn(
                "the model has SyncBatchNorm, whose statistics are those of the global batch, "
                "but whose gradients are exact for equal shares only (docs/limits.md)",
                PoiseWarning,
                stacklevel=3,
            )
        elif any(isinstance(layer, _BatchNorm) for layer in layers) and self.workers > 1:
            warnings.warn(
                "the model has BatchNorm, which normalizes each worker's local batch by itself, "
                "so the training is not the same as on one machine; running statistics are "
                "merged by share in every step. A local batch of one sample can be too small for "
                "it: drop_last=True leaves small last batches out",
                PoiseWarning,
                stacklevel=3,
            )
