"""Poise trains one model on unequal machines as fast as their sum allows."""

from poise.core.cluster import Network, Worker
from poise.core.plan import Plan
from poise.core.planning import plan
from poise.errors import PoiseError

__all__ = ["Network", "Plan", "PoiseError", "Worker", "__version__", "plan"]

__version__ = "0.1.0"
