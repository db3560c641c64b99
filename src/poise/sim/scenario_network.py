"""The table [network] of a scenario: times of buckets, or sizes of buckets and speeds of links."""

from dataclasses import replace

import numpy as np

from poise.core.cluster import Network
from poise.core.timing import Floats
from poise.errors import InvalidSetting
from poise.sim.reduction import MOST_IN_RING, Ring
from poise.sim.scenario_keys import Keys, from_0

_KEYS = ("ready", "bucket_s", "bucket_bytes", "link_bytes_per_s", "latency_s", "drag")


def declared_network(keys: Keys) -> tuple[Network, Ring | None, float]:
    """Return the network, its ring if it has one, and its drag."""
    toml = keys.toml
    table = toml.table("network")
    toml.check_keys(_KEYS, "network")
    drag = keys.number("drag", 0.0, "network", most=100.0)
    plain = {key: table[key] for key in ("ready", "bucket_s") if key in table}
    try:
        if "bucket_bytes" not in table:
            for key in ("link_bytes_per_s", "latency_s"):
                if key in table:
                    raise InvalidSetting(f"{key}={table[key]!r} needs bucket_bytes; give both")
            return Network(**plain), None, drag
        if "bucket_s" in table:
            raise InvalidSetting("bucket_s= and bucket_bytes= exclude each other; give one")
        sizes = table["bucket_bytes"]
        if not isinstance(sizes, list) or not all(from_0(each) is not None for each in sizes):
            raise InvalidSetting(f"bucket_bytes={sizes!r}; give a list of bytes, one per bucket")
        network = Network(ready=plain.get("ready", (1.0,)), bucket_s=tuple(sizes))
    except InvalidSetting as error:
        raise toml.blame(error, "network") from None
    links = _links(keys)
    ring = Ring(np.array(network.bucket_s), links, keys.number("latency_s", 0.0, "network"))
    if len(links) > MOST_IN_RING:
        where = toml.where("network", key="bucket_bytes")
        raise InvalidSetting(
            f"{where} makes a ring of {len(links)} workers; give bucket_s instead beyond "
            f"{MOST_IN_RING}, since every round of a ring is simulated"
        )
    return replace(network, bucket_s=tuple(ring.bucket_s.tolist())), ring, drag


def _links(keys: Keys) -> Floats:
    """Return the bytes per second of each worker's link: its own, or that of all."""
    default = keys.number("link_bytes_per_s", None, "network", least=1.0)
    values: list[float] = []
    for number, kind in enumerate(keys.cluster.kinds, start=1):
        own = keys.number("link_bytes_per_s", default, "worker", number, least=1.0)
        if own is None:
            where = keys.toml.where("worker", number)
            raise InvalidSetting(
                f"{where} has no link_bytes_per_s, which a ring needs; give it there or in "
                "[network] for all"
            )
        values += [own] * kind.count
    return np.array(values, dtype=np.float64)
