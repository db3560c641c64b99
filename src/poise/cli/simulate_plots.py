"""The pictures of `poise simulate`: throughput, progress, timelines and local batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from poise.cli.plot_batches import batches
from poise.cli.plot_curves import drawable, progress, throughput
from poise.cli.plot_timeline import timeline
from poise.cli.requirements import require
from poise.errors import InvalidSetting
from poise.sim.outcome import Outcome
from poise.sim.scenario import Scenario

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Subject = Literal["throughput", "progress", "timeline", "batches"]
DPI = 150


@dataclass(frozen=True, eq=False)
class Picture:
    """One of the pictures of a comparison."""

    subject: Subject
    outcome: Outcome | None
    """Whose it is; None: it shows all."""
    figure: "Figure"

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        return self.subject if self.outcome is None else f"{self.subject}-{self.outcome.policy}"

    def png(self) -> bytes:
        """Return the file."""
        file = BytesIO()
        self.figure.savefig(file, format="png", dpi=DPI)
        return file.getvalue()


def check_directory(path: Path) -> None:
    """Raise unless pictures can be drawn into a directory, which is made."""
    require("matplotlib", extra="report")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be made: {error.strerror or error}") from None


def draw_all(scenario: Scenario, outcomes: Sequence[Outcome], directory: Path) -> list[Path]:
    """Write all pictures; raises InvalidSetting if a file cannot be written."""
    check_directory(directory)
    drawn = []
    for picture in pictures(scenario, outcomes):
        path = directory / f"{picture.name}.png"
        write(path, picture.png())
        drawn.append(path)
    return drawn


def pictures(scenario: Scenario, outcomes: Sequence[Outcome]) -> Iterator[Picture]:
    """Draw what there is to show: of all policies first, then of each that was not refused."""
    shown = drawable(outcomes)
    if not shown:
        return
    yield Picture("throughput", None, throughput(scenario, shown))
    advance = progress(scenario, shown)
    if advance is not None:
        yield Picture("progress", None, advance)
    for each in shown:
        yield Picture("timeline", each, timeline(scenario, each))
        yield Picture("batches", each, batches(scenario, each))


def write(path: Path, contents: bytes) -> None:
    """Write a file; raises InvalidSetting if that cannot be."""
    try:
        path.write_bytes(contents)
    except OSError as error:
        raise InvalidSetting(f"{path} cannot be written: {error.strerror or error}") from None
