"""From what a script hands in to what trains: checked, agreed on with the other workers, built."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from poise.runtime.batches import MapBatches, StreamBatches
from poise.runtime.checks import check_epoch, check_models_fit, check_range
from poise.runtime.events import HandedOut
from poise.runtime.memory import Guard
from poise.runtime.meter import Meter
from poise.runtime.orders import Orders
from poise.runtime.passes import TrainingPass
from poise.runtime.session import Equipment, Session
from poise.torch.backwards import is_usable
from poise.torch.checks import (
    as_list,
    check_all_used,
    check_loader,
    check_models,
    check_optimizers,
    is_stream,
    length_of,
    model_facts,
    warn_of_batch_size,
    warn_of_normalization,
)
from poise.torch.clocks import clock_of
from poise.torch.compiling import Graphs, is_compiled, let_size_vary
from poise.torch.devices import member_on
from poise.torch.gloo import disconnecting
from poise.torch.groups import Groups
from poise.torch.loader import ShareLoader, lead
from poise.torch.memory import memory_of
from poise.torch.micro import MicroBatches
from poise.torch.module import Link, SharedModule
from poise.torch.norms import Norms
from poise.torch.orders import orders_of
from poise.torch.places import Places
from poise.torch.settings import TorchSettings
from poise.torch.stream import StreamLoader
from poise.torch.updates import Updates


@dataclass(frozen=True, eq=False)
class HandedIn:
    """What a script hands to prepare, checked."""

    models: list[nn.Module]
    optimizers: list[Optimizer]
    loader: DataLoader[Any]
    orders: Orders | None
    """The orders of the epochs; None for a stream."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Of all models."""
        return [parameter for model in self.models for parameter in model.parameters()]


@dataclass(frozen=True, eq=False)
class Built:
    """What trains."""

    models: list[SharedModule]
    loader: ShareLoader | StreamLoader
    orders: Orders | None
    links: Sequence[Link]
    micro: MicroBatches
    updates: Updates

    @property
    def stream(self) -> StreamLoader | None:
        """The loader, if it is one of a stream."""
        return self.loader if isinstance(self.loader, StreamLoader) else None


def handed_in(
    session: Session, settings: TorchSettings, model: Any, optimizer: Any, loader: Any
) -> HandedIn:
    """Check what a script hands in, and see that all workers have the same."""
    models, optimizers = as_list(model), as_list(optimizer)
    check_models(models)
    stateful = settings.inner is not None and settings.inner.state is not None
    check_models_fit(len(models), stateful_hook=stateful, adapts=settings.adapt is not None)
    check_optimizers(optimizers, models)
    check_loader(loader)
    found = HandedIn(models, optimizers, loader, _orders(session, loader))
    if settings.adapt is not None:
        check_all_used((p for p in found.parameters if p.requires_grad), optimizers)
    session.peers.control.agree(_facts(session, settings, found), "prepare")
    if session.generation.worker == 0:
        warn_of_batch_size(loader.batch_size, settings.global_batch)
        if session.generation.workers > 1:
            warn_of_normalization(models)
    return found


def build(
    session: Session,
    settings: TorchSettings,
    groups: Groups,
    handed: HandedIn,
    most_samples: int | None,
) -> Built:
    """Build what trains; all workers call it together."""
    guard = equip(session, groups, handed)
    compiles = any(is_compiled(model) for model in handed.models)
    if compiles:
        session.events.on(HandedOut, lambda event: let_size_vary(event.contents))
    loader = training_loader(session, handed)
    places = Places(session)
    with session.peers.liveness.together("prepare"), disconnecting():
        links = [Link.made(model, session, places, settings) for model in handed.models]
    micro = MicroBatches(
        session,
        links,
        most_samples=most_samples,
        guard=guard,
        prepared=let_size_vary if compiles else lambda _: None,
    )
    updates = Updates(session, handed.optimizers, links, micro, most_samples)
    models = [SharedModule(link) for link in links]
    return Built(models, loader, handed.orders, links, micro, updates)


def _orders(session: Session, loader: DataLoader[Any]) -> Orders | None:
    if is_stream(loader):
        return None
    settings = session.settings
    orders = orders_of(loader, length_of(loader), settings.seed, session.peers.control)
    if loader.drop_last:
        check_epoch(len(orders), settings.global_batch)
    if settings.adapt is not None:
        check_range(len(orders), settings.adapt.highest)
    return orders


def _facts(session: Session, settings: TorchSettings, handed: HandedIn) -> dict[str, object]:
    """Describe what must be the same on all workers."""
    orders, models = handed.orders, handed.models
    facts: dict[str, object] = {
        "global_batch": settings.global_batch,
        "adapt": settings.adapt,
        "rate": settings.rule,
        "the use of scaler": settings.scaler is not None,
        "seed": settings.seed,
        "idle": settings.idle,
        "the policy": type(settings.policy).__name__,
        "the policy's first plans": [
            (plan.start_step, plan.split) for plan in session.first_plans.plans
        ],
        "the use of count": settings.count is not None,
        "the use of comm_hook": settings.inner is not None,
        "the use of record": settings.recorded,
        "the kind of data set": "a stream" if orders is None else "a map",
        **{
            f"the {name} of the data set": value
            for name, value in ({} if orders is None else orders.identity()).items()
        },
        "drop_last": handed.loader.drop_last,
        "the number of models": len(models),
    }
    for number, model in enumerate(models):
        facts.update(model_facts(model, f" of model {number}" if len(models) > 1 else ""))
    return facts


def equip(session: Session, groups: Groups, handed: HandedIn) -> Guard:
    """Choose the group that sums gradients by their devices, and bring clocks and meters."""
    device = next(p.device for p in handed.parameters if p.requires_grad)
    peers, loader, settings = session.peers, handed.loader, session.settings
    devices = peers.control.texts(device.type, "prepare")
    with peers.liveness.together("prepare"), disconnecting():
        peers.generation = replace(peers.generation, gradients=groups.gradients(devices))
    sharers = peers.introduce(member_on(device))
    clock, guard = clock_of(device), Guard(memory_of(device, sharers))
    meter = Meter(clock, guard, loads_itself=loader.num_workers == 0)
    norms = None
    if settings.adapt is not None:
        norms = Norms(clock, device, peers, settings.scaler)
        norms.listen(session.events)
    session.equip(
        Equipment(
            clock=clock,
            meter=meter,
            norms=norms,
            lead=lead(loader),
            usable=lambda: is_usable([p.grad for p in handed.parameters]),
            compiled=Graphs().changed,
        )
    )
    return guard


def training_loader(session: Session, handed: HandedIn) -> ShareLoader | StreamLoader:
    """Return the loader of this worker's shares."""
    settings, loader = session.settings, handed.loader
    passes = TrainingPass(session)
    if handed.orders is None:
        batches = StreamBatches(passes, session.peers)
        return StreamLoader(loader, batches, settings.slicer)
    source = MapBatches(
        passes,
        handed.orders,
        session.peers,
        drop_last=loader.drop_last,
        idle=settings.idle,
    )
    return ShareLoader(loader, settings.source(source), seed=settings.seed, slicer=settings.slicer)
