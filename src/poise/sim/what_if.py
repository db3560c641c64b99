"""Scenarios with something else: one more worker, a faster network."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from poise.core.cluster import Network
from poise.errors import InvalidSetting
from poise.toml_file import Toml, nearest


@dataclass(frozen=True)
class WhatIf:
    """What is changed in a scenario file."""

    more: tuple[tuple[str, int], ...] = ()
    """So many further workers like those of a table, by its name."""
    network: float = 1.0
    """How many times as fast the network is."""

    def __bool__(self) -> bool:
        return bool(self.more) or self.network != 1

    def __str__(self) -> str:
        words = [f"{count} more {name}" for name, count in self.more]
        if self.network != 1:
            words.append(f"a network {self.network:g} times as fast")
        return " and ".join(words)

    def applied(self, toml: Toml) -> Toml:
        """Return the file with the changes; its own tables stay as they are."""
        tables = dict(toml.tables)
        if self.more:
            tables["worker"] = self._workers(toml)
            walks = toml.array("walk")
            if walks:
                raise walks[0].wrong(
                    "",
                    "has one speed per worker, and --more adds some; add them to the file, with "
                    "their speeds",
                )
        network = self._network(toml, tables)
        if network:
            tables["network"] = network
        server = dict(toml.table("server").values)
        if "exchange_s" in server:
            tables["server"] = {**server, "exchange_s": server["exchange_s"] / self.network}
        return replace(toml, tables=tables)

    def _workers(self, toml: Toml) -> list[Mapping[str, Any]]:
        workers = [table.values for table in toml.array("worker")]
        names = [str(table.get("name", "")) for table in workers]
        for name, count in self.more:
            if name not in names or not name:
                known = [each for each in names if each]
                hint = nearest(name, known) if known else "give its [[worker]] a name"
                raise InvalidSetting(
                    f"--more {name}: {toml.name} has no [[worker]] of that name; {hint}"
                )
            place = names.index(name)
            like = workers[place]
            workers[place] = {**like, "count": like.get("count", 1) + count}
        return workers

    def _network(self, toml: Toml, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the network of the larger group: a ring sends (n - 1) / n of all bytes twice."""
        network = dict(toml.table("network").values)
        if "bucket_s" in network:
            before, now = _count(toml.tables), _count(tables)
            plain = {key: network[key] for key in ("ready", "bucket_s") if key in network}
            times = Network(**plain).among(before, now).bucket_s
            network["bucket_s"] = [seconds / self.network for seconds in times]
        elif "bucket_bytes" in network:
            sizes, latency_s = network["bucket_bytes"], network.get("latency_s", 0.0)
            network["bucket_bytes"] = [size / self.network for size in sizes]
            network["latency_s"] = latency_s / self.network
        return network


def _count(tables: Mapping[str, Any]) -> int:
    return sum(int(table.get("count", 1)) for table in tables["worker"])
