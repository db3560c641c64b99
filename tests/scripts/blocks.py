"""Blocks for good in step 2, on the worker of this number if one is given."""

import sys
import time

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer


def wait_for_good() -> None:
    time.sleep(3600)


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
balancer = Balancer(global_batch=16)
model, optimizer, loader = balancer.prepare(model, optimizer, DataLoader(data, batch_size=16))
for step, (x, y) in enumerate(loader):
    if step == 2 and balancer.workers > 1 and balancer.worker == int(sys.argv[1]):
        wait_for_good()
    cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
