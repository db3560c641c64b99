"""One run of a script under observation: `python -m poise.verify.worker`.

Started by `poise verify` as `DIRECTORY VARIANT STEPS SCRIPT ARGS...`, once for every worker. What
it sees goes to a file in the directory, and so does the script's stderr; its stdout is not shown.
"""

import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from poise.environment import launched_as
from poise.errors import WorkerLost
from poise.runtime.events import Events
from poise.runtime.instruments import Instrument, instrumented
from poise.script import own_frames, run
from poise.verify.course import Course
from poise.verify.observation import Observation, Variant, write
from poise.verify.observer import Enough, Observer, Refused
from poise.verify.reporting import Reporting, answer_when_asked, stack_file
from poise.verify.watching import watching

_SEED = 0
_FAILED = 1
_REFUSED = 3


def observe(
    directory: Path,
    variant: Variant,
    steps: int,
    script: Sequence[str],
    *,
    failing: Callable[[BaseException], None] = lambda _: None,
    listen: Callable[[Events], None] = lambda _: None,
) -> None:
    """Run a script, given with its arguments, for that many steps; write down what is seen.

    An error of the script leaves it as it is; failing hears of it before the other workers do.
    Others can listen to the script's trainings, too. Raises Refused if there is nothing to compare.
    """
    observer = Observer(steps, variant, Course(directory, variant))
    with _alike(), instrumented(Instrument(listen=listen)), watching(observer, variant):
        try:
            _run(observer, script, failing)
        finally:
            if dist.is_initialized():  # the script's own group, which it can no longer destroy
                dist.destroy_process_group()
    write(directory, variant, _checked(observer.seen, script[0]))


def errors_file(directory: Path, variant: Variant, worker: int) -> Path:
    """Where the stderr of the script goes."""
    return directory / f"{variant}-{worker}.stderr"


def refusal_file(directory: Path) -> Path:
    """Where a worker says why the script cannot be verified."""
    return directory / "refusal.txt"


def culprit_file(directory: Path) -> Path:
    """Where a worker that fails by itself, not because of others, leaves its number."""
    return directory / "culprit.txt"


def main(arguments: Sequence[str]) -> int:
    """Observe as one worker of the group that the environment describes."""
    directory, variant, script = Path(arguments[0]), Variant.named(arguments[1]), arguments[3:]
    launch = launched_as()
    assert launch is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends us
    reporting = Reporting(_redirect(errors_file(directory, variant, launch.worker)))
    answer_when_asked(stack_file(directory, variant, launch.worker))

    def failing(error: BaseException) -> None:
        if not isinstance(error, Refused):
            _show(error, script[0])
        if not isinstance(error, Refused | WorkerLost):
            culprit_file(directory).write_text(str(launch.worker))

    try:
        steps = int(arguments[2])
        observe(directory, variant, steps, script, failing=failing, listen=reporting.listen)
    except Refused as refused:
        refusal_file(directory).write_text(str(refused))
        return _REFUSED
    except (Exception, SystemExit):
        return _FAILED
    return 0


def _run(
    observer: Observer, script: Sequence[str], failing: Callable[[BaseException], None]
) -> None:
    """Run the script to its end, or as far as the observer wants to see it."""
    try:
        try:
            run(script)
        except SystemExit as left:
            if left.code:
                raise
        for balancer in observer.balancers:
            balancer.close()
    except Enough:
        return
    except BaseException as error:
        failing(error)
        for balancer in observer.balancers:
            balancer.__exit__(type(error), error, error.__traceback__)
        raise


def _checked(seen: Observation | None, script: str) -> Observation:
    if seen is None:
        raise Refused(
            f"{script} ended without calling Balancer.prepare, where verify begins to look; "
            "give a script, and arguments, that train with a Balancer"
        )
    if not any(step.used for step in seen.steps):
        raise Refused(
            f"no optimizer used a gradient in the {len(seen.steps)} steps that {script} took, so "
            "there is nothing to compare; raise --steps"
        )
    return seen


@contextmanager
def _alike() -> Iterator[None]:
    """Let the script begin with the same random numbers in every run, and compute in one thread.

    Afterwards the generators go on where they were.
    """
    threads, states = torch.get_num_threads(), (random.getstate(), np.random.get_state())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        random.seed(_SEED)
        np.random.seed(_SEED)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            torch.set_num_threads(threads)


def _redirect(errors: Path) -> int:
    """Keep the script's output away from the terminal; return the number of the pipe to the parent.

    It stays open: its end tells that we ended.
    """
    pipe = os.dup(sys.stdout.fileno())
    with open(os.devnull, "w") as nothing, errors.open("w") as file:
        os.dup2(nothing.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    return pipe


def _show(error: BaseException, script: str) -> None:
    """Print an error as if the script had been run by itself."""
    if isinstance(error, SystemExit):
        sys.stderr.write(f"{script} called sys.exit({error.code!r})\n")
        return
    traceback.print_exception(type(error), error, own_frames(error.__traceback__))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
