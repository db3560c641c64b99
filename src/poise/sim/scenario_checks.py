"""Whether the parts of a scenario go together."""

from poise.engine.modes import Sync
from poise.errors import InvalidSetting, PoiseError
from poise.sim.scenario import MOVES, Scenario
from poise.toml_file import Toml


def check(toml: Toml, scenario: Scenario) -> None:
    """Raise if the parts do not go together; the file says where they stand."""
    top, training = toml.top, toml.table("training")
    try:
        assert scenario.model.workers
    except PoiseError as error:
        raise InvalidSetting(f"{toml.name}: {error}") from None
    if not len(scenario.first):
        raise top.wrong("", "has no worker at the start; let one be there from step 0")
    for event in toml.array("event"):
        if scenario.ring is None and "slower_link" in event.values:
            raise event.wrong(
                "slower_link",
                "has slower_link, and links are those of a ring; give bucket_bytes and "
                "link_bytes_per_s in [network], or use slower_network",
            )
        if not scenario.model.input_s.any() and "slower_loader" in event.values:
            raise event.wrong(
                "slower_loader",
                "has slower_loader, and no loader is a limit; give input_s to its [[worker]]",
            )
    _check_moves(toml, scenario)
    with_server = not isinstance(scenario.mode, Sync)
    if "server" in toml.tables and not with_server:
        raise toml.table("server").wrong("", 'means nothing with mode = "sync"; leave it out')
    if scenario.restart_s and with_server:
        raise top.wrong(
            "restart_s", "has restart_s, and with a server nobody else stops; leave it out"
        )
    if with_server and (scenario.ring is not None or scenario.drag or scenario.stride > 1):
        raise top.wrong(
            "mode",
            "has a server, which knows no ring, drag or stride; leave those out, and say what an "
            "exchange takes in [server]",
        )
    adapts = scenario.learning is not None and scenario.learning.adapt is not None
    if adapts and with_server:
        raise training.wrong(
            "adapt",
            'lets the global batch move, and with a server it stays; use mode = "sync", or leave '
            "adapt out",
        )
    if scenario.stride > 1 and scenario.changes_over_steps:
        raise training.wrong(
            "stride",
            "lets a step stand for several, and events, drift and failures count steps; leave "
            "one of them out",
        )
    try:
        here = scenario.limits.take(scenario.first.tolist())
        here.check(scenario.global_batch)
        for each in scenario.policies:
            scenario.policy(each).init(len(scenario.first), scenario.global_batch)
    except PoiseError as error:
        raise InvalidSetting(f"{toml.name}: {error}") from None


def _check_moves(toml: Toml, scenario: Scenario) -> None:
    """Raise if it is unclear which of two moves of a worker comes first."""
    units: dict[int, bool] = {}
    for event in scenario.events:
        if event.what not in MOVES:
            continue
        for worker in event.workers:
            if units.setdefault(worker, event.at_step is None) != (event.at_step is None):
                raise InvalidSetting(
                    f"{toml.name} moves {scenario.names[worker]} by at_step and by at_s, "
                    "so that it is unclear what comes first; use one of them"
                )
