"""Policies by their names, and as plain data: a name and its settings, and back."""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from poise.core.plain import from_plain, to_plain
from poise.errors import InvalidSetting
from poise.policy.auto import Auto
from poise.policy.base import Policy
from poise.policy.lbbsp import LbBsp
from poise.policy.optperf import OptPerf
from poise.policy.proportional import Proportional
from poise.policy.stated import Even, Fixed, Static

KINDS: dict[str, type[Policy]] = {
    "auto": Auto,
    "even": Even,
    "fixed": Fixed,
    "lbbsp": LbBsp,
    "optperf": OptPerf,
    "proportional": Proportional,
    "static": Static,
}
_WITH_NUMBERS = {"fixed": "Fixed([...])", "static": "Static([...])"}


@dataclass(frozen=True)
class PolicyName:
    """A policy as a record holds it."""

    name: str
    settings: Any


def policy_named(name: str) -> Policy:
    """Return the policy of that name, with its own settings."""
    if name in _WITH_NUMBERS:
        raise InvalidSetting(
            f"policy={name!r} needs one number per worker; "
            f"use {_WITH_NUMBERS[name]} from poise.policy"
        )
    if name not in KINDS:
        near = get_close_matches(name, KINDS, n=1)
        hint = f"did you mean {near[0]!r}? There are" if near else "use one of"
        raise InvalidSetting(
            f"policy={name!r} is unknown; {hint} {sorted(KINDS.keys() - _WITH_NUMBERS)}, "
            "Fixed([...]), Static([...]), or a policy object"
        )
    return KINDS[name]()


def named(policy: Policy) -> PolicyName | None:
    """Return the name and settings of one of Poise's own policies; None for any other.

    >>> named(Fixed([3, 5]))
    PolicyName(name='fixed', settings={'splits': [[0, [3, 5]]]})
    """
    for name, kind in KINDS.items():
        if type(policy) is kind:
            return PolicyName(name, to_plain(policy))
    return None


def policy_of(name: PolicyName) -> Policy:
    """Return the policy with its settings."""
    if name.name not in KINDS:
        raise InvalidSetting(
            f"the policy {name.name!r} is unknown to this version; there are {sorted(KINDS)}"
        )
    return from_plain(KINDS[name.name], name.settings)
