"""The data set draws its noise from a generator of its own."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

from poise.torch import Balancer


class Noisy(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self) -> None:
        self.x, self.y = torch.randn(64, 12), torch.randint(0, 5, (64,))
        self.generator = torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = 0.1 * torch.randn(12, generator=self.generator)
        return self.x[index] + noise, int(self.y[index])


torch.manual_seed(1)
data = Noisy()
model: nn.Module = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5))
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
