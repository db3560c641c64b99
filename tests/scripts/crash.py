"""One of several workers fails in its second step."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer

model: nn.Module = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=16)

balancer = Balancer(global_batch=16)
model, optimizer, loader = balancer.prepare(model, optimizer, loader)
for step, (x,) in enumerate(loader):
    if step == 1 and os.environ.get("RANK") == "1":
        raise ValueError("the disk is full")
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
