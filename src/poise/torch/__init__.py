"""Poise for PyTorch: `Balancer` wraps a training script in three lines."""

from poise.policy import Even, Fixed
from poise.torch.balancer import Balancer

__all__ = ["Balancer", "Even", "Fixed"]
