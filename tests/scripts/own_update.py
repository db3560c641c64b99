"""The script changes the weights by itself, from each worker's own samples."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from poise.torch import Balancer

torch.manual_seed(1)
data = TensorDataset(torch.randn(64, 12), torch.randint(0, 5, (64,)))
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
        with torch.no_grad():
            model.get_parameter("0.weight").add_(0.1 * x.mean(0))
