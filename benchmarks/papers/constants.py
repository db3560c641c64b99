"""The numbers of `constants.toml`, as clusters that the simulator takes."""

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from poise.cluster_file import DeclaredCluster, Kind
from poise.core.cluster import Network, Worker

CONSTANTS: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("constants.toml").read_text(encoding="utf-8")
)
CLUSTERS = tuple(CONSTANTS["cluster"])
WORKLOADS = tuple(CONSTANTS["workload"])


@cache
def gpus(cluster: str, workload: str) -> DeclaredCluster:
    """Return one of Cannikin's clusters, with the times that a workload takes on it."""
    work = CONSTANTS["workload"][workload]
    workers: list[Worker] = []
    kinds: list[Kind] = []
    for device, count in CONSTANTS["cluster"][cluster]:
        names = [device if count == 1 else f"{device}-{number}" for number in range(count)]
        kinds.append(Kind(device, range(len(workers), len(workers) + count)))
        workers += [_worker(name, device, work) for name in names]
    network = network_of(work["parameters"], len(workers))
    return DeclaredCluster(workers=tuple(workers), network=network, kinds=tuple(kinds))


def line_of(device: str, work: dict[str, Any]) -> tuple[float, float]:
    """Return the compute line of a device: measured, or scaled from the card next to it."""
    lines = work["lines"]
    if device in lines:
        per_sample_s, fixed_s = lines[device]
        return per_sample_s, fixed_s
    near = CONSTANTS["compute"]["scaled_from"]
    per_sample_s, fixed_s = lines[near]
    devices = CONSTANTS["device"]
    return per_sample_s * devices[near]["fp32"] / devices[device]["fp32"], fixed_s


def most_of(device: str, work: dict[str, Any]) -> int:
    """Return the largest local batch of a device: measured, or what its memory holds."""
    most = work["most"]
    if device in most:
        return int(most[device])
    memory = CONSTANTS["device"][device]["memory_gb"] * 1e9
    if "bytes_per_sample" in work:
        return int(memory / work["bytes_per_sample"] + 1e-9)
    return int(most[CONSTANTS["compute"]["scaled_from"]])


def network_of(parameters: int, workers: int) -> Network:
    """Return the reduction of a model's gradient, in equal buckets that are ready one by one."""
    network = CONSTANTS["network"]
    whole = parameters * network["bytes_per_parameter"]
    buckets = math.ceil(whole / network["bucket_bytes"])
    ring_s = 2 * (workers - 1) / workers * whole / network["bytes_per_s"]
    ready = tuple((number + 1) / buckets for number in range(buckets))
    return Network(ready=ready, bucket_s=(ring_s / buckets,) * buckets)


def bucket_bytes(parameters: int, network: Network) -> list[float]:
    """Return the bytes of each bucket."""
    whole = parameters * CONSTANTS["network"]["bytes_per_parameter"]
    return [whole / len(network.bucket_s)] * len(network.bucket_s)


def _worker(name: str, device: str, work: dict[str, Any]) -> Worker:
    per_sample_s, fixed_s = line_of(device, work)
    forward = CONSTANTS["compute"]["forward_share"]
    return Worker(
        name=name,
        forward_s=(forward * per_sample_s, forward * fixed_s),
        backward_s=((1 - forward) * per_sample_s, (1 - forward) * fixed_s),
        max_batch=most_of(device, work),
    )
