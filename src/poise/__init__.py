"""Poise trains one model on unequal machines as fast as their sum allows."""

from poise.core.plan import Plan
from poise.errors import PoiseError

__all__ = ["Plan", "PoiseError", "__version__"]

__version__ = "0.1.0"
