"""Policies: rules that choose the split."""

from collections.abc import Callable
from difflib import get_close_matches

from poise.errors import InvalidSetting
from poise.policy.auto import Auto
from poise.policy.base import Decision, Forecasting, Policy
from poise.policy.bounds import Bounds
from poise.policy.even import Even
from poise.policy.fixed import Fixed
from poise.policy.lbbsp import LbBsp
from poise.policy.optperf import OptPerf
from poise.policy.proportional import Proportional
from poise.policy.static import Static

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

BY_NAME: dict[str, Callable[[], Policy]] = {
    "auto": Auto,
    "even": Even,
    "lbbsp": LbBsp,
    "optperf": OptPerf,
    "proportional": Proportional,
}
_WITH_NUMBERS = {"fixed": "Fixed([...])", "static": "Static([...])"}


def policy_named(name: str) -> Policy:
    """Return the policy of that name, with its own settings."""
    if name in _WITH_NUMBERS:
        raise InvalidSetting(
            f"policy={name!r} needs one number per worker; "
            f"use {_WITH_NUMBERS[name]} from poise.policy"
        )
    if name not in BY_NAME:
        near = get_close_matches(name, [*BY_NAME, *_WITH_NUMBERS], n=1)
        hint = f"did you mean {near[0]!r}? There are" if near else "use one of"
        raise InvalidSetting(
            f"policy={name!r} is unknown; {hint} {sorted(BY_NAME)}, Fixed([...]), "
            "Static([...]), or a policy object"
        )
    return BY_NAME[name]()
