"""`poise lab`: real unequal workers on one machine."""

from collections.abc import Sequence

from poise.cli.requirements import require
from poise.environment import launched_as
from poise.errors import InvalidSetting
from poise.lab import Lab


def lab(
    *,
    speeds: str,
    walk: str | None,
    link: str | None,
    pace: str | None,
    from_start: bool,
    mode: str,
    script: Sequence[str],
) -> int:
    """Run a script on unequal workers; return 0 or the exit code of the first that fails.

    With a server, the exit code is its own.

    Args:
        speeds: of the workers, with commas.
        walk: the file that says how speeds change.
        link: rates of the workers' networks.
        pace: how long paced workers take.
        from_start: whether to throttle before training is prepared.
        mode: "sync", or "async" or "stale:S" for workers with a server.
        script: a training script and its arguments.
    """
    require("torch", extra="torch")
    if launched_as() is not None:
        raise InvalidSetting("the lab starts its own workers; run it without torchrun")
    with Lab(speeds, walk=walk, link=link, pace=pace, from_start=from_start, mode=mode) as bench:
        bench.start(script)
        return bench.wait()
