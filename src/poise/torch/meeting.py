"""Why a worker could not meet the others: what its error advises."""

from poise.core.reachability import is_own, why_not_met
from poise.environment import Launch, local_workers
from poise.errors import InvalidSetting
from poise.runtime.reaching import host_and_port, look_at, own_addresses, source_toward

_ELSE = "look for one that failed before its Balancer"


def advice_on_meeting(launch: Launch | None, error: str) -> str:
    """Say what probably kept this worker from meeting the others, and what to set.

    It takes up to a few seconds: names are resolved, and worker 0's address is tried.

    Args:
        launch: this worker's place, as its launcher says.
        error: what gloo or the store said.
    """
    if launch is None or local_workers() == launch.workers:
        return _ELSE
    try:
        host, port = host_and_port(launch.address)
    except InvalidSetting:  # MASTER_ADDR or MASTER_PORT is missing, as the error says
        return _ELSE
    sight, end = look_at(host, port)
    if end is not None:
        end.close()
    own = own_addresses(source_toward(sight.addresses[0]) if sight.addresses else None)
    here = any(is_own(own, address) for address in sight.addresses)
    several = local_workers() is not None or not here
    return why_not_met(own, sight, error, several_machines=several) or _ELSE
