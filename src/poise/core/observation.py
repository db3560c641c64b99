"""What the workers report and a policy decides on."""

from dataclasses import dataclass

from poise.core.split import Split


@dataclass(frozen=True)
class Observation:
    """One step as all workers saw it."""

    step: int
    split: Split
    """The split that this step was trained with."""
    compiling: tuple[int, ...] = ()
    """Workers on which torch.compile was at work since their last report."""
