"""Policies: rules that choose the split."""

from poise.errors import InvalidSetting
from poise.policy.base import Policy
from poise.policy.even import Even
from poise.policy.fixed import Fixed

__all__ = ["Even", "Fixed", "Policy", "policy_named"]

_BY_NAME = {"even": Even}


def policy_named(name: str) -> Policy:
    """Return the policy of that name."""
    if name == "auto":
        raise InvalidSetting(
            'policy="auto" needs live balancing, which this version does not have; '
            'use policy="even" or policy=Fixed([...])'
        )
    if name not in _BY_NAME:
        raise InvalidSetting(
            f"policy={name!r} is unknown; use one of {sorted(_BY_NAME)}, Fixed([...]), "
            "or a policy object"
        )
    return _BY_NAME[name]()
