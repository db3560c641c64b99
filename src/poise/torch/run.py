"""The state of one run that loader, exchange, reduction and balancer share."""

from dataclasses import dataclass, field

from poise.core.plan import Timetable
from poise.engine.progress import Progress
from poise.torch.cluster import Cluster
from poise.torch.liveness import Liveness


@dataclass
class Run:
    """Where this worker is: the place in the training and the plans it knows."""

    cluster: Cluster
    liveness: Liveness
    timetable: Timetable
    progress: Progress = field(default_factory=Progress)
    compared: bool = False
    """Whether the workers have compared their places since this pass over the loader began."""
