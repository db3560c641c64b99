"""Dropout as a function leaves no layer to be found."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer

torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 12), torch.randint(0, 5, (64,)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.outer(dropout(torch.tanh(self.inner(x)), p=0.2))
        return scores


model: nn.Module = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

balancer = Balancer(global_batch=16)
loader = DataLoader(data, batch_size=16, shuffle=True)
model, optimizer, loader = balancer.prepare(model, optimizer, loader)
for _ in balancer.epochs(2):
    for x, y in loader:
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
