"""A look inside a Balancer, for tests of what users do not see: the one place that does it."""

from typing import Any

from poise.core.timing import Floats
from poise.runtime.session import Session
from poise.torch import Balancer


def session_of(balancer: Balancer) -> Session:
    """Return the session behind a synchronous training."""
    training: Any = balancer._training
    session: Session = training._session
    return session


def loader_of(balancer: Balancer) -> Any:
    """Return the DataLoader inside the prepared one."""
    training: Any = balancer._training
    return training._built.loader._loader


def norms_row(balancer: Balancer, step: int) -> Floats:
    """Return what was seen of the gradients of a step."""
    equipment: Any = session_of(balancer)._equipment
    row: Floats = equipment.norms.row(step)
    return row
