"""What `poise simulate` draws: pictures, and a page of HTML that holds them, and a table."""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from poise.cli.durations import duration
from poise.cli.plot_batches import batches
from poise.cli.plot_curves import drawable, progress, throughput
from poise.cli.plot_sheet import counted, file_of, write
from poise.cli.plot_timeline import timeline, timeline_facts
from poise.cli.simulate_findings import Findings
from poise.sim.outcome import Outcome
from poise.sim.scenario import Scenario

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --quiet: #5b636d; --page: #fbfbfa;
  --card: #fff; --line: #dfe2e6; --accent: #1b6ca8; }
@media (prefers-color-scheme: dark) { :root { --text: #e4e6ea; --quiet: #9aa3ad;
  --page: #16181c; --card: #1e2126; --line: #343941; --accent: #76b5e3; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2.5rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .8rem; padding-top: 1.2rem;
  border-top: 1px solid var(--line); }
p { margin: .4rem 0; overflow-wrap: anywhere; }
.quiet, figcaption, footer { color: var(--quiet); font-size: .9rem; }
nav { margin-top: 1.2rem; font-size: .9rem; }
nav a { color: var(--accent); margin-right: .9rem; text-decoration: none; }
nav a:hover { text-decoration: underline; }
.table { overflow-x: auto; margin: 1.6rem 0 1.2rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .9rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; }
thead th { color: var(--quiet); font-weight: 600; font-size: .85rem; }
tbody tr { border-top: 1px solid var(--line); }
ul { padding-left: 1.2rem; margin: .8rem 0; }
figure { margin: 0 0 1.4rem; }
img { display: block; width: 100%; height: auto; background: #fff; padding: .6rem;
  border: 1px solid var(--line); border-radius: 8px; }
figcaption { margin-top: .4rem; }
footer { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--line); }
@media print { nav { display: none; } figure { break-inside: avoid; } }
"""
_SAFE = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""What a browser may load: nothing that is not in the file."""
_MOST = 12
"""Kinds that are named."""
_HEADINGS = {"throughput": "Throughput", "progress": "Progress to the goal"}
_CAPTIONS = {
    "throughput": "Higher is better. A curve ends when its training does.",
    "progress": "A sample of a larger global batch teaches less, and counts for less.",
    "timeline": "What each worker does. The less of it is waiting, the better the split.",
    "batches": "How many samples of each step every worker gets.",
}


@dataclass(frozen=True, eq=False)
class Picture:
    """One of the pictures of a comparison."""

    subject: str
    policy: str
    """Whose it is; empty: it shows all."""
    figure: Figure
    words: str
    """What is on it, for those who do not see it."""

    @property
    def name(self) -> str:
        """Of its file, without the ending."""
        return f"{self.subject}-{self.policy}" if self.policy else self.subject

    @cached_property
    def png(self) -> bytes:
        """The file, which is drawn when it is first asked for."""
        return file_of(self.figure)


def draw_all(findings: Findings, directory: Path) -> list[Path]:
    """Write the page and all pictures; raises InvalidSetting if a file cannot be written."""
    scenario, outcomes = findings.scenario, findings.outcomes
    drawn = list(pictures(scenario, outcomes))
    text = page(scenario, outcomes, drawn, findings.rows(), findings.sentences())
    files = {directory / f"{each.name}.png": each.png for each in drawn}
    files = {directory / "index.html": text.encode(), **files}
    for path, contents in files.items():
        write(path, contents)
    return list(files)


def pictures(scenario: Scenario, outcomes: Sequence[Outcome]) -> Iterator[Picture]:
    """Draw what there is to show: of all policies first, then of each that was not refused."""
    shown = drawable(outcomes)
    if not shown:
        return
    means = ", ".join(f"{each.policy} {each.samples_per_s:,.0f}" for each in shown)
    words = f"Throughput over virtual time; samples per second on average: {means}."
    yield Picture("throughput", "", throughput(scenario, shown), words)
    advance = progress(scenario, shown)
    if advance is not None:
        words = f"Progress to the goal over virtual time: {', '.join(map(_end, shown))}."
        yield Picture("progress", "", advance, words)
    for each in shown:
        facts = timeline_facts(scenario, each.timeline)
        words = f"What workers do in the last steps with {each.policy}: {facts}."
        yield Picture("timeline", each.policy, timeline(scenario, each), words)
        words = (
            f"Local batches over steps with {each.policy}; in the last step from "
            f"{min(each.last_split):,} to {max(each.last_split):,} samples."
        )
        yield Picture("batches", each.policy, batches(scenario, each), words)


def page(
    scenario: Scenario,
    outcomes: Sequence[Outcome],
    drawn: Sequence[Picture],
    rows: Sequence[Sequence[str]],
    sentences: Iterable[str],
) -> str:
    """Return a page that needs no other file, no network and no script.

    Args:
        scenario: what was simulated.
        outcomes: what came of it.
        drawn: the pictures of that.
        rows: the table of policies, its heading first.
        sentences: what the table does not say.
    """
    title = escape(scenario.cluster.title or counted(scenario.workers, "worker"))
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_SAFE}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{title}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            f"<h1>{title}</h1>",
            *_introduction(scenario),
            *_table(rows),
            *_list(sentences),
            *_links(outcomes),
            *_sections(outcomes, drawn),
            "<footer>Simulated by poise simulate: no time on this page was measured.</footer>",
            "</main>",
            "</body>",
            "</html>\n",
        )
    )


def _introduction(scenario: Scenario) -> Iterator[str]:
    if scenario.cluster.note:
        yield f"<p>{escape(scenario.cluster.note)}</p>"
    kinds = ", ".join(f"{kind.count:,} {kind.name}" for kind in scenario.cluster.kinds[:_MOST])
    more = ", …" if len(scenario.cluster.kinds) > _MOST else ""
    facts = (
        f"workers: {kinds}{more}",
        f"global batch {scenario.global_batch:,}",
        f"mode {scenario.mode}",
        f"seed {scenario.seed}",
    )
    yield f'<p class="quiet">{escape(" · ".join(facts))}</p>'


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    heading, *body = rows
    yield '<div class="table"><table>'
    cells = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heading)
    yield f"<thead><tr>{cells}</tr></thead>"
    yield "<tbody>"
    for first, *others in body:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in others)
        yield f'<tr><th scope="row">{escape(first)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _list(sentences: Iterable[str]) -> Iterator[str]:
    items = [f"<li>{escape(sentence)}</li>" for sentence in sentences]
    if items:
        yield "<ul>"
        yield from items
        yield "</ul>"


def _links(outcomes: Sequence[Outcome]) -> Iterator[str]:
    links = (
        f'<a href="#policy-{number}">{escape(outcome.policy)}</a>'
        for number, outcome in enumerate(outcomes)
    )
    yield f'<nav aria-label="policies">{"".join(links)}</nav>'


def _sections(outcomes: Sequence[Outcome], drawn: Sequence[Picture]) -> Iterator[str]:
    """Yield the pictures of all policies, then a section for each policy."""
    for picture in drawn:
        if not picture.policy:
            yield f"<section><h2>{_HEADINGS[picture.subject]}</h2>{_figure(picture)}</section>"
    for number, outcome in enumerate(outcomes):
        yield f'<section id="policy-{number}"><h2>Policy {escape(outcome.policy)}</h2>'
        if outcome.refused:
            yield f"<p>It cannot follow: {escape(outcome.refused)}</p>"
        yield from (_figure(picture) for picture in drawn if picture.policy == outcome.policy)
        yield "</section>"


def _figure(picture: Picture) -> str:
    data = b64encode(picture.png).decode("ascii")
    return (
        f'<figure><img alt="{escape(picture.words)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{_CAPTIONS[picture.subject]}</figcaption></figure>"
    )


def _end(outcome: Outcome) -> str:
    if outcome.target_s is None:
        return f"{outcome.policy} is not there after {duration(outcome.clock_s)}"
    return f"{outcome.policy} is there after {duration(outcome.target_s)}"
