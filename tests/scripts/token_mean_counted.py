"""The loss is a mean over tokens, and count says so."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer

torch.manual_seed(1)
tokens = torch.randint(1, 20, (64, 9))
tokens[torch.arange(9) >= torch.randint(2, 10, (64, 1))] = 0  # padding
data = TensorDataset(tokens, tokens.roll(1, dims=1))
model: nn.Module = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def count(batch: list[torch.Tensor]) -> int:
    return int((batch[1] > 0).sum())


balancer = Balancer(global_batch=16, count=count)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = balancer.prepare(model, optimizer, loader)
for _ in balancer.epochs(2):
    for x, y in loader:
        loss = cross_entropy(model(x).transpose(1, 2), y, ignore_index=0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
