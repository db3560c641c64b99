"""What the command line asks of `poise simulate`."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import replace

from poise.cli.options import above_0, whole
from poise.errors import InvalidSetting
from poise.policy.naming import KINDS
from poise.sim.scenario import Scenario
from poise.sim.scenario_file import MOST_STEPS, declared_scenario
from poise.toml_file import Toml, nearest


def add_options(parser: ArgumentParser) -> None:
    """Add what can be asked."""
    parser.description = (
        f"{parser.description} The engine is that of live training; workers and clock are virtual. "
        "Shows the mean step, waiting, regret to the best split, plan changes, the time to the "
        "goal, worker-hours and cost."
    )
    parser.add_argument("file", metavar="SCENARIO.toml", help="a cluster, and what happens to it")
    parser.add_argument("--json", dest="as_json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--out", metavar="DIR", help="draw pictures and a page, index.html; needs poise[report]"
    )
    parser.add_argument(
        "--record", metavar="DIR", help="write the record of each policy, POLICY.jsonl"
    )
    parser.add_argument(
        "--policy",
        dest="policies",
        action="append",
        default=[],
        metavar="NAME",
        help="only this policy; may be given several times (default: those of the file)",
    )
    parser.add_argument(
        "--steps", type=whole("steps", 1), metavar="N", help="instead of the file's"
    )
    parser.add_argument("--seed", type=_seed, metavar="S", help="instead of the file's")
    parser.add_argument(
        "--more",
        type=_more,
        action="append",
        default=[],
        metavar="WORKER[=N]",
        help="what if there were one more worker, or N, like those of this name",
    )
    parser.add_argument(
        "--network",
        type=above_0("a number"),
        default=1.0,
        metavar="F",
        help="what if the network were F times as fast",
    )


def asked_scenario(
    toml: Toml, *, policies: Sequence[str], steps: int | None, seed: int | None
) -> Scenario:
    """Return the scenario of a file, with what is asked instead of what the file says."""
    scenario = declared_scenario(toml)
    if steps is not None:
        if steps > MOST_STEPS:
            raise InvalidSetting(f"--steps {steps} is too many; give at most {MOST_STEPS}")
        late = [event.at_step for event in scenario.events if event.at_step is not None]
        if late and max(late) >= steps:
            raise InvalidSetting(
                f"--steps {steps} ends before the event of step {max(late)}; give more"
            )
        scenario = replace(scenario, steps=steps)
    if seed is not None:
        scenario = replace(scenario, seed=seed)
    if len(set(policies)) < len(policies):
        raise InvalidSetting(f"--policy {policies[-1]} is given twice; give it once")
    for name in policies:
        if name not in KINDS:
            raise InvalidSetting(f"--policy {name} is unknown; {nearest(name, KINDS)}")
        if name == "fixed" and not scenario.split:
            raise InvalidSetting(f"--policy fixed needs split = [...] in {toml.name}")
        if name == "static" and not scenario.resources:
            raise InvalidSetting(f"--policy static needs a resource of each worker in {toml.name}")
    return replace(scenario, policies=tuple(policies)) if policies else scenario


def _seed(text: str) -> int:
    if not text.isdigit():
        raise ArgumentTypeError(f"{text!r} is not a seed, a whole number from 0 up")
    return int(text)


def _more(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not name or (count and (not count.isdigit() or int(count) < 1)):
        raise ArgumentTypeError(f"{text!r} is not a worker's name, or NAME=N with N from 1")
    return name, int(count or 1)
