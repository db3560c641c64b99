"""From what a script hands in to what trains and evaluates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from poise.runtime.batches import Evaluation, MapBatches, StreamBatches
from poise.runtime.events import HandedOut
from poise.runtime.finiteness import Finiteness
from poise.runtime.memory import Guard
from poise.runtime.meter import Meter
from poise.runtime.orders import Orders
from poise.runtime.session import Equipment, Session
from poise.torch.backwards import is_usable
from poise.torch.checks import HandedIn, check_loader, is_stream
from poise.torch.compiling import Graphs, let_size_vary
from poise.torch.devices import clock_of, member_on, memory_of
from poise.torch.gloo import disconnecting
from poise.torch.groups import Groups
from poise.torch.loader import ShareLoader, lead
from poise.torch.micro import MicroBatches
from poise.torch.module import Link, SharedModule
from poise.torch.norms import Norms
from poise.torch.orders import orders_of
from poise.torch.own_part import is_used
from poise.torch.places import Places
from poise.torch.settings import TorchSettings
from poise.torch.stream import StreamLoader
from poise.torch.torch_private import is_compiled_itself
from poise.torch.updates import Updates


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


def build(
    session: Session,
    settings: TorchSettings,
    groups: Groups,
    handed: HandedIn,
    most_samples: int | None,
) -> Built:
    """Build what trains; all workers call it together."""
    guard = equip(session, groups, handed)
    compiles = any(is_compiled_itself(part) for model in handed.models for part in model.modules())
    if compiles:
        session.events.on(HandedOut, lambda event: let_size_vary(event.contents))
    loader = training_loader(session, handed)
    places = Places(session)
    with session.peers.liveness.together("prepare"), disconnecting():
        links = [Link.made(model, session, places, settings) for model in handed.models]
    micro = MicroBatches(session, links, guard, most_samples, compiles=compiles)
    updates = Updates(session, handed.optimizers, links, micro, most_samples)
    models = [SharedModule(link) for link in links]
    return Built(models, loader, handed.orders, links, micro, updates)


def equip(session: Session, groups: Groups, handed: HandedIn) -> Guard:
    """Choose the group that sums gradients by their devices, and bring clocks and meters."""
    device = next(p.device for p in handed.parameters if p.requires_grad)
    peers, loader, settings = session.peers, handed.loader, session.settings
    devices = peers.control.texts(device.type, "prepare")
    with peers.liveness.together("prepare"), disconnecting():
        peers.generation = replace(peers.generation, gradients=groups.gradients(devices))
    sharers = peers.introduce(member_on(device))
    clock, guard = clock_of(device), Guard(memory_of(device, sharers))
    norms = None
    if settings.adapt is not None:
        norms = Norms(clock, device, peers, settings.scaler)
        norms.listen(session.events)
    Finiteness(peers, is_used).listen(session.events)
    session.equip(
        Equipment(
            clock=clock,
            meter=Meter(clock, guard, loads_itself=loader.num_workers == 0),
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
    if handed.orders is None:
        return StreamLoader(loader, StreamBatches(session), settings.slicer)
    batches = MapBatches(
        session,
        handed.orders,
        drop_last=loader.drop_last,
        idle=settings.idle,
        arranged=settings.arranged,
    )
    return ShareLoader(loader, batches, settings)


def evaluation_loader(session: Session, loader: DataLoader[Any]) -> ShareLoader | StreamLoader:
    """Return a loader of this worker's shares of the batches of another loader."""
    check_loader(loader)
    assert loader.batch_size is not None
    settings, evaluation = session.settings, Evaluation(session, loader.batch_size)
    if is_stream(loader):
        return StreamLoader(loader, StreamBatches(evaluation), settings.slicer)
    orders = orders_of(loader, settings.seed, session.peers.control.drawn)
    return ShareLoader(loader, MapBatches(evaluation, orders, drop_last=loader.drop_last), settings)
