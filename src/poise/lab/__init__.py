"""Real workers on one machine."""

from poise.lab.lab import Lab
from poise.lab.pacing import Pace, Pacer
from poise.lab.quota import Quota
from poise.lab.walk import Change, Walk

__all__ = ["Change", "Lab", "Pace", "Pacer", "Quota", "Walk"]
