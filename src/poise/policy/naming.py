"""Policies as plain data: a name and its settings, and back."""

from dataclasses import dataclass
from typing import Any

from poise.core.plain import from_plain, to_plain
from poise.errors import InvalidSetting
from poise.policy.auto import Auto
from poise.policy.base import Policy
from poise.policy.even import Even
from poise.policy.fixed import Fixed
from poise.policy.lbbsp import LbBsp
from poise.policy.optperf import OptPerf
from poise.policy.proportional import Proportional
from poise.policy.static import Static

KINDS: dict[str, type[Any]] = {
    "auto": Auto,
    "even": Even,
    "fixed": Fixed,
    "lbbsp": LbBsp,
    "optperf": OptPerf,
    "proportional": Proportional,
    "static": Static,
}


@dataclass(frozen=True)
class PolicyName:
    """A policy as a record holds it."""

    name: str
    settings: Any


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
    policy: Policy = from_plain(KINDS[name.name], name.settings)
    return policy
