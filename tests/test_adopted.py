"""A DistributedDataParallel that somebody else made gets its gradients from our sum."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from poise.policy import Fixed
from poise.runtime.events import Events
from poise.runtime.session import Session
from poise.torch.checks import HandedIn, handed_in
from poise.torch.groups import Groups
from poise.torch.module import Link
from poise.torch.places import Places
from poise.torch.preparation import equip, training_loader
from poise.torch.settings import TorchSettings
from poise.torch.updates import Updates
from tests.cluster import Workers
from tests.test_exactness import EXACT
from tests.training import Recipe, build, dataset, distance, train_plain, weights

RECIPE = Recipe(samples=50, global_batch=12, epochs=3)


def train_a_ddp_of_ones_own(backend: str, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Make the group and the wrapped model as a framework does, and only then meet Poise."""
    dist.init_process_group(backend)
    model, optimizer, _ = build(RECIPE)
    wrapped = DistributedDataParallel(model, **options)
    policy = Fixed({0: [7, 2, 3], 6: [0, 1, 11]})
    settings = TorchSettings(global_batch=12, policy=policy)
    groups = Groups(None)
    session = Session(settings, groups.generation, groups.rendezvous, Events())
    loader = DataLoader(dataset(RECIPE), 12, shuffle=True)
    handed: HandedIn = handed_in(session, settings, model, optimizer, loader)
    equip(session, groups, handed)
    link = Link.adopted(wrapped, session, Places(session), settings)
    updates = Updates(session, [optimizer], [link])
    for _ in session.epochs(RECIPE.epochs):
        for inputs, targets, _samples in training_loader(session, handed):
            nn.functional.cross_entropy(wrapped(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = weights(model)
    updates.release()
    link.release()
    session.close(groups.leave)
    del wrapped
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("backend", "options"),
    [("gloo", {}), ("cpu:gloo", {"bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True})],
)
def test_its_gradients_are_those_of_one_process(
    workers: Workers, backend: str, options: dict[str, Any]
) -> None:
    plain = train_plain(RECIPE)
    for found in workers.run(train_a_ddp_of_ones_own, backend, options, workers=3):
        assert distance(found, plain) < EXACT
