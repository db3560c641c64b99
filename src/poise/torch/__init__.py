"""Poise for PyTorch: `Balancer` wraps a training script in three lines."""

from poise.engine.modes import Async, Stale
from poise.policy import Even, Fixed, Static
from poise.torch.balancer import Balancer
from poise.torch.schedule import BySamples

__all__ = ["Async", "Balancer", "BySamples", "Even", "Fixed", "Stale", "Static"]
