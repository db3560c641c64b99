"""The state of one run that loader, exchange, reduction and balancer share."""

from dataclasses import dataclass, field

from poise.core.plan import Plan, Timetable
from poise.engine.progress import Progress
from poise.torch.cluster import Cluster
from poise.torch.liveness import Liveness


@dataclass
class Run:
    """Where this worker is: the place in the training and the plans it knows."""

    cluster: Cluster
    liveness: Liveness
    timetable: Timetable
    plan: Plan
    """The plan of the batch handed out last: what all workers know to be in effect."""
    progress: Progress = field(default_factory=Progress)
    backwards: int = 0
    """Backwards that reached the model's parameters since the last batch was handed out."""
    reductions: int = 0
    """Backwards whose gradient is reduced, since then."""
    compared: bool = False
    """Whether the workers have compared their places since this pass over the loader began."""
