"""The command `poise calibrate`: a scenario from the record of a training."""

import json
import math
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from poise.errors import InvalidSetting, PoiseError
from poise.records import Series, read_series
from poise.sim.calibration import Calibration, calibrated
from poise.sim.calibration_text import scenario_text


def add_arguments(parser: ArgumentParser) -> None:
    """Add what `calibrate` takes."""
    parser.description = (
        f"{parser.description} Speeds, reductions, loaders and noise are those that were measured; "
        "how well they predict is tried on steps that were held out. The scenario is one for "
        "poise simulate: ask there what one more worker or a faster network would bring."
    )
    parser.add_argument(
        "run",
        metavar="RUN",
        help='a record: Balancer(record="run.jsonl"); those of restarts (run.2.jsonl ...) are '
        "read with it",
    )
    parser.add_argument(
        "--out", metavar="FILE", help="write the scenario there (default: print it)"
    )
    parser.add_argument(
        "--json", dest="as_json", action="store_true", help="print what was found as JSON"
    )
    parser.set_defaults(command=calibrate)


def calibrate(run: str, out: str | None, *, as_json: bool) -> int:
    """Write a scenario file, or print it; return the exit code."""
    series = read_series(run)
    try:
        found = calibrated(*series)
    except PoiseError as error:
        raise InvalidSetting(f"{run}: {error}") from None
    text = scenario_text(found, Path(run).name)
    if out is not None:
        _write(Path(out), text)
    if as_json:
        print(json.dumps({**_plain(found, series), "scenario": text}, indent=2, allow_nan=False))
        return 0
    if out is None:
        sys.stdout.write(text)
    for sentence in _sentences(found, series):
        print(sentence, file=sys.stderr if out is None else sys.stdout)
    if out is not None:
        print(f"written: {out}; try: poise simulate {out} --more worker-0")
    return 0


def _write(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise InvalidSetting(
            f"--out {path} exists, and a scenario may hold your own changes; choose another name"
        ) from None
    except OSError as error:
        raise InvalidSetting(f"--out {path} cannot be written: {error.strerror}") from None
    except ValueError as error:  # a name that no file can have
        raise InvalidSetting(f"--out {str(path)!r} cannot be written: {error}") from None


def _sentences(found: Calibration, series: Series) -> Iterator[str]:
    if len(series) > 1:
        yield f"read: {', '.join(path.name for path in series.paths)}"
    measured, predicted = found.measured_s * 1e3, found.predicted_s * 1e3
    yield f"{found.model.workers} workers, {found.steps:,} measured steps, {found.splits:,} splits"
    yield f"steps of the last split took {measured:.1f} ms on average, {predicted:.1f} ms predicted"
    if math.isnan(found.error):
        yield "no steps could be held out, so the error is not known"
    else:
        yield (
            f"held-out step times are mispredicted by {100 * found.error:.1f} % on average, in "
            f"{found.held_out} groups of steps"
        )
    yield from (f"note: {each}" for each in found.guessed)


def _plain(found: Calibration, series: Series) -> dict[str, object]:
    return {
        "records": [str(path) for path in series.paths],
        "workers": found.model.workers,
        "steps": found.steps,
        "splits": found.splits,
        "error": None if math.isnan(found.error) else found.error,
        "held_out": found.held_out,
        "measured_s": found.measured_s,
        "predicted_s": found.predicted_s,
        "guessed": list(found.guessed),
    }
