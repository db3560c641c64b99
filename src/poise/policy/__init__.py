"""Policies: rules that choose the split."""

from poise.policy.auto import Auto
from poise.policy.base import Decision, Forecasting, Policy
from poise.policy.bounds import Bounds
from poise.policy.lbbsp import LbBsp
from poise.policy.naming import policy_named
from poise.policy.optperf import OptPerf
from poise.policy.proportional import Proportional
from poise.policy.stated import Even, Fixed, Static

__all__ = [
    "Auto",
    "Bounds",
    "Decision",
    "Even",
    "Fixed",
    "Forecasting",
    "LbBsp",
    "OptPerf",
    "Policy",
    "Proportional",
    "Static",
    "policy_named",
]
