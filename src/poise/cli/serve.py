"""`poise serve`: a user's own script as the server of a training that workers join."""

import shlex
import socket
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from poise.cli.options import above_0, add_script, require, whole, without_dashes
from poise.engine.modes import Mode, Sync, mode_of
from poise.environment import launched_as, shared_secret
from poise.errors import InvalidSetting
from poise.runtime.door import check_secret, is_loopback, listening
from poise.runtime.events import Prepared
from poise.runtime.instruments import Instrument, instrumented
from poise.script import check_script, run, show_error

PORT = 29600
"""Where a server listens unless told otherwise.

Not 29400 or 29500, which torchrun takes on the same machines, and below 32768, from where on Linux
gives ports to whoever connects.
"""

_LAST_PORT = 65535
_SAVE_EVERY_S = 60.0
_EVERYWHERE = ("", "0.0.0.0", "::", "[::]")
_FAILED = 1


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `serve` takes."""
    parser.usage = (
        "poise serve [-h] [--host H] [--port P] [--workers N] [--mode MODE] [--save FILE] "
        "[--save-every S] [--closed] SCRIPT [ARGS ...]"
    )
    parser.description = (
        f"{parser.description} The script runs unchanged; it holds the weights, applies the "
        "gradients that workers push, and evaluates and saves as the script says. A worker is the "
        "same script, started anywhere with POISE_SERVER set to the server's address. Workers may "
        "join and leave at any time. Off 127.0.0.1, POISE_SECRET must be set to the same words "
        "on all. A table on stderr shows what each worker contributes. The exit code is the "
        "script's own."
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="H", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=whole("a port", 0, _LAST_PORT),
        default=PORT,
        metavar="P",
        help=f"port to listen on, 0 for any that is free (default {PORT})",
    )
    parser.add_argument(
        "--workers",
        type=whole("a number of workers", 1),
        default=1,
        metavar="N",
        help="training starts when so many have joined; more may join later (default 1)",
    )
    parser.add_argument(
        "--mode",
        metavar="MODE",
        help="async, or stale:S for workers at most S steps apart (default: as the script says, "
        "else async)",
    )
    parser.add_argument(
        "--save",
        metavar="FILE",
        help="save model, optimizer and place there, and go on from there if it exists",
    )
    parser.add_argument(
        "--save-every",
        dest="save_every_s",
        type=above_0("a number of seconds"),
        metavar="S",
        help="seconds between two saves (default 60); it is saved after each epoch too",
    )
    parser.add_argument(
        "--closed",
        action="store_true",
        help="once training has begun, end with an error when all workers are lost, instead of "
        "waiting for others",
    )
    add_script(parser)
    parser.set_defaults(command=serve)


def serve(
    *,
    script: list[str],
    host: str = "127.0.0.1",
    port: int = PORT,
    workers: int = 1,
    mode: str | None = None,
    save: str | None = None,
    save_every_s: float | None = None,
    closed: bool = False,
) -> int:
    """Run a script, given with its arguments, as a server; return its own exit code.

    Args:
        script: the path of a Python file, or `-m` and a module, and its arguments; maybe after --.
        host: the address to listen on.
        port: the port; 0: any that is free.
        workers: how many must have joined before training starts.
        mode: "async" or "stale:S"; None: as the script says, and else "async".
        save: a file to save everything to, and to go on from; None: nothing is saved.
        save_every_s: seconds between two saves; None: 60.
        closed: whether to end when all workers are lost, instead of waiting for others.
    """
    if launched_as() is not None:
        raise InvalidSetting(
            "a server is one process, which a launcher's workers join; start poise serve without "
            "torchrun"
        )
    script = without_dashes(script)
    if not script or script == ["-m"]:
        raise InvalidSetting("serve needs a script; give the path of a Python file")
    if script[0] != "-m":
        check_script(script)
    chosen = _served_mode(mode)
    _check_save(save, save_every_s)
    require("torch", extra="torch")
    # Not above: these import torch, whose absence is to be told in one line.
    from poise.cli.serve_board import ServeBoard
    from poise.torch.asynchronous.role import Serving, serving_as

    board = ServeBoard()
    serving = Serving(
        host=host,
        port=port,
        workers=workers,
        closed=closed,
        mode=chosen,
        save=None if save is None else Path(save).absolute(),
        save_every_s=save_every_s or _SAVE_EVERY_S,
        show=board.show,
        announce=lambda address: board.say(invitation(address, script)),
    )
    check_secret(host, shared_secret())
    listening(host, port).close()  # raises before the script has loaded its data
    try:
        with serving_as(serving):
            return _served(script)
    finally:
        board.end()


def invitation(address: str, script: Sequence[str]) -> str:
    """Say where the server is, and how a worker joins.

    >>> invitation("127.0.0.1:29600", ["a.py"])
    'serving at 127.0.0.1:29600; workers join with POISE_SERVER=127.0.0.1:29600 python a.py'
    """
    host, _, port = address.rpartition(":")
    reached = f"{socket.gethostname()}:{port}" if host in _EVERYWHERE else address
    joining = f"POISE_SERVER={reached} {shlex.join(['python', *script])}"
    secret = "" if is_loopback(host) else ", and with POISE_SECRET set as it is here"
    return f"serving at {address}; workers join with {joining}{secret}"


def _served(script: Sequence[str]) -> int:
    """Run the script to its end as `python SCRIPT` does: sys.exit passes, errors are printed.

    The Balancer, which closes at the end of the process, tells the workers of what ended it. Python
    notes that in sys.last_value; here it is caught, to be shown as it should be, so we note it.
    """
    prepared: list[Prepared] = []
    noting = Instrument(listen=lambda events: events.on(Prepared, prepared.append))
    try:
        with instrumented(noting):
            run(script)
    except SystemExit as ending:
        if ending.code:
            sys.last_value = ending
        if ending.code or prepared:
            raise
    except (KeyboardInterrupt, Exception) as error:
        sys.last_value = error
        if isinstance(error, KeyboardInterrupt):
            raise
        show_error(error)
        return _FAILED
    if not prepared:
        raise InvalidSetting(
            f"{shlex.join(script)} ended without Balancer.prepare, so there was nothing to serve; "
            "give a script that trains with poise.torch.Balancer"
        )
    return 0


def _served_mode(stated: str | None) -> Mode | None:
    mode = None if stated is None else mode_of(stated)
    if isinstance(mode, Sync):
        raise InvalidSetting(
            "--mode sync has no server: start the workers with torchrun, or give --mode async or "
            "--mode stale:4"
        )
    return mode


def _check_save(save: str | None, every_s: float | None) -> None:
    if save is None and every_s is not None:
        raise InvalidSetting("--save-every has nothing to save to; give --save FILE too")
    if save is not None and not Path(save).absolute().parent.is_dir():
        raise InvalidSetting(f"--save {save} is in a directory that is not there; make it first")
    if save is not None and Path(save).is_dir():
        raise InvalidSetting(f"--save {save} is a directory; give the path of a file")
