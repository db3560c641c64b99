"""What the asynchronous benchmark trains, in which ways, and on which workers."""

from dataclasses import dataclass
from typing import Any

import torch
from adaptive_tasks import IMAGES
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from poise.engine.modes import Async, Stale
from poise.sim.scenes import ASP_CORES
from poise.torch import Balancer, BySamples

TASK = IMAGES
"""Model and data; batch, learning rate and momentum are this benchmark's own."""
GLOBAL_BATCH = 256
"""With half of it, what an iteration costs beside its samples leaves the slowest worker one."""
LEARNING_RATE = 0.32
MOMENTUM = 0.0
"""As `python benchmarks/async.py --choose` finds it; run in two parts, it printed in the mean of
three seeds 75.4, 79.8 and 82.6 percent for 0.16, 0.32 and 0.64 without momentum, and 78.9 and 78.0
for 0.04 and 0.08 with 0.9; 1.28 failed with every seed, and 0.16 with momentum 0.9 with one."""
WORKERS = 4
CHOICES = [(rate, 0.0) for rate in (0.16, 0.32, 0.64, 1.28)]
CHOICES += [(rate, 0.9) for rate in (0.04, 0.08, 0.16)]
"""Of learning rate and momentum, of which `--choose` finds the best."""
TOTAL_CORES = 1.35
"""Of all workers, so that the server, which has no quota, finds some of two cores free."""
BOUND = 4
"""Steps that workers of the stale-synchronous training may be apart."""

UNIFORM, BALANCED, DAMPED, STALE, SYNC = "uniform", "balanced", "damped", f"stale {BOUND}", "sync"
KINDS: dict[str, dict[str, Any]] = {
    UNIFORM: {"policy": "even", "mode": Async(damped=False)},
    BALANCED: {"policy": "auto", "mode": Async(damped=False)},
    DAMPED: {"policy": "auto", "mode": Async(damped=True)},
    STALE: {"policy": "auto", "mode": Stale(BOUND)},
    SYNC: {"policy": "auto", "mode": "sync"},
}
"""The trainings that are compared, as options of a Balancer."""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One training, the same for all processes."""

    number: int
    """Counted over all trainings of these processes."""
    kind: str
    seed: int
    samples: int
    snapshots: int
    """How often weights are kept, at equal distances."""
    learning_rate: float = LEARNING_RATE
    momentum: float = MOMENTUM

    def model(self) -> nn.Module:
        """Return the network as the seed begins it."""
        return TASK.new_model(self.seed)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer, whose momentum is lowered by the server."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate, momentum=self.momentum)

    def schedule(self, optimizer: torch.optim.Optimizer, balancer: Balancer) -> BySamples:
        """Let the learning rate fall to zero with the samples that all workers have pushed."""
        steps = -(-self.samples // GLOBAL_BATCH)
        return BySamples(CosineAnnealingLR(optimizer, steps), balancer, GLOBAL_BATCH)


def speeds(level: int) -> list[float]:
    """Return the workers' quotas in cores, in the ratios of a heterogeneity level."""
    cores = ASP_CORES[level]
    return [TOTAL_CORES * each / sum(cores) for each in cores]
