"""What Poise costs on equal workers: plain DistributedDataParallel against Balancer.

Run: `make bench NAME=overhead [ARGS="--quick --json"]`. `--quick` takes less than three minutes
and measures less; the bars are the same. With PYTHONPATH set to another `src`, another version is
measured: nothing here knows more of Poise than a user's script does.

**Ratios.** Two worker processes, one torch thread each, gloo on loopback. Each process holds three
trainings of the same small CNN on the same data: DDP, a second DDP, and Poise with its default
policy. The local batch is chosen at the start so that a step of DDP takes about 50 ms. A round runs
one block of steps of each training, in random order, each after a barrier. A block's wall time is
that of the slower worker, its CPU time the sum over both workers and all their threads. The paired
ratio of a round is Poise / mean of the two DDP blocks, which is quieter than one of them; the A/A
ratio is the second DDP / the first. Shown are the median over rounds and its 95 % bootstrap
interval. The run goes on until both intervals (wall and CPU) are narrow enough or the time is over.
Loading, epoch changes and optimizer are inside the blocks. Poise's heartbeat (twice a second) also
runs during the blocks of DDP; its own time is part of the next figure.

**Own code.** Afterwards trainings on Poise with a stopwatch around each place where torch or the
user's loop enters our code (`own_code.py`), stopped while our code is inside torch's loader or DDP,
or waits for others. It counts the hook with its weighting, the callbacks after the sum, the
loader's cutting, fetching and handing out, the call of the model, the hooks of optimizer and
gradients, and the heartbeat. It does not count the launch of the all-reduce in C++, which plain DDP
does too; that is shown beside it. The stopwatch's own cost (about 2 us a section) is inside. Two
figures, on the worker where CPU time is larger: CPU time of our code / CPU time of the step, and
the same in wall time, which with two workers and their communication threads on two cores includes
the moments in which our code waits for a core; the heartbeat counts with its CPU time in both. Both
grow with the parameters per sample, since weighting passes over all gradients. Figures without a
bar: microseconds of CPU time of our code per step, on the worker where it is largest, with 2 and
with 16 workers (16 processes that share the cores), for the policies even and auto.

**Memory.** The model is wider here, so that its largest bucket has the size that DDP aims at,
25 MiB. Peaks of private resident memory while stepping, in pairs of processes that run
nothing but one training, several times each; the figure is the difference of the medians over all
processes, in units of the largest gradient bucket. The peak counter is reset after the first
steps, so that start-up does not hide it, and the C library returns freed blocks at once. Unlike
a count of tensors this includes connections, threads and imported code; pages of library files,
which processes share, are left out. The spread among equal processes is printed beside it.
"""

import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from figures import Figure, Interval, as_json, judged, paired_ratio, show
from options import Effort, options
from own_code import (
    LAUNCH,
    LOADER,
    MODEL,
    WAITING,
    OwnCode,
    ReadySamples,
    Stopwatch,
    borders,
    collating,
    measured,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from workers import end_on_sigterm, run_workers

WORKERS = 2
MANY_WORKERS = 16
POLICIES = ("even", "auto")
"""Of which own code is measured; auto is the default, with which all else is."""
RATIO_BAR = 1.02
WIDTH_BAR = 0.04
OWN_CODE_BAR = 0.02
MEMORY_BAR = 1.0

_SAMPLES = 2048
_CLASSES = 10
_STEP_S = 0.050
_STEP_RANGE_S = (0.040, 0.060)
_BLOCK_STEPS = 4
_CHECK_ROUNDS = 5
_OWN_CODE_S = 24.0
"""Time kept free for the last phase."""
_MANY_LOCAL_BATCH = 4
_START_S = 120.0
"""In which workers must have started, on a busy machine."""
_MEMORY_LOCAL_BATCH = 8
_MEMORY_HIDDEN = 6000
"""Makes 6.6 million parameters, with a bucket of about the 25 MiB that DDP aims at."""
_MEMORY_STEPS = 30
_WARM_UP_STEPS = 5

Kind = Literal["ddp", "poise"]


@dataclass(frozen=True)
class Amount:
    """How much is measured; nothing else may depend on it."""

    limit_s: float
    """The whole run ends about then."""
    rounds: int
    """Fewest rounds of blocks."""
    memory_runs: int
    """Pairs of processes of each kind."""
    own_steps: int
    """Steps in which our own code is measured."""
    many: int = MANY_WORKERS
    local_batch: int | None = None
    """None: the one at which a step takes about 50 ms."""


AMOUNTS = {
    "full": Amount(limit_s=900.0, rounds=300, memory_runs=7, own_steps=100),
    "quick": Amount(limit_s=160.0, rounds=40, memory_runs=2, own_steps=100),
    "smoke": Amount(
        limit_s=0.0, rounds=_CHECK_ROUNDS, memory_runs=1, own_steps=6, many=3, local_batch=2
    ),
}


@dataclass(frozen=True)
class Round:
    """The blocks of one round, in the order DDP, second DDP, Poise."""

    wall_s: tuple[float, float, float]
    cpu_s: tuple[float, float, float]


@dataclass(frozen=True)
class Comparison:
    """What one worker found in the main run."""

    local_batch: int
    rounds: list[Round]
    own_code: dict[str, OwnCode]
    """By policy."""


@dataclass(frozen=True)
class Memory:
    """Peaks of private resident memory, one per process."""

    ddp_bytes: list[int]
    poise_bytes: list[int]
    bucket_bytes: int

    @property
    def extra_bytes(self) -> float:
        """What Poise takes beyond DDP."""
        return statistics.median(self.poise_bytes) - statistics.median(self.ddp_bytes)

    @property
    def spread_bytes(self) -> int:
        """Largest difference between processes that do the same."""
        return max(max(b) - min(b) for b in (self.ddp_bytes, self.poise_bytes))


@dataclass
class Training:
    """A training that is run step by step."""

    model: Callable[[Tensor], Tensor]
    optimizer: Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]

    def run(self, steps: int) -> None:
        """Take steps."""
        for _ in range(steps):
            x, y = next(self.batches)
            loss = cross_entropy(self.model(x), y)
            torch.autograd.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()


def main() -> None:
    """Measure, and print the figures."""
    parser = options("What Poise costs on equal workers.", quick="less than three minutes")
    arguments = parser.parse_args()
    end_on_sigterm()
    amount = AMOUNTS[arguments.effort]
    if not arguments.json:
        print(f"measuring, for at most {amount.limit_s / 60:.1f} minutes", file=sys.stderr)

    deadline = time.time() + amount.limit_s
    memory = measure_memory(amount, give_up=time.time() + amount.limit_s / 3)
    many = run_workers(
        own_code_by_policy,
        _MANY_LOCAL_BATCH,
        amount.own_steps,
        workers=amount.many,
        limit_s=amount.limit_s + _START_S,
    )
    found: list[Comparison] = run_workers(
        compare,
        amount,
        deadline - _OWN_CODE_S,
        workers=WORKERS,
        limit_s=amount.limit_s + _START_S,
    )
    report(found, many, memory, effort=arguments.effort, json=arguments.json)


def most_of(workers: list[dict[str, OwnCode]]) -> dict[str, OwnCode]:
    """Return what the worker found whose own code takes most, for each policy."""
    return {
        policy: max((each[policy] for each in workers), key=lambda own: own.own_cpu_s)
        for policy in POLICIES
    }


def report(
    found: list[Comparison],
    many: list[dict[str, OwnCode]],
    memory: Memory,
    *,
    effort: Effort,
    json: bool,
) -> None:
    rounds = found[0].rounds
    wall, wall_a_a = ratios([each.wall_s for each in rounds])
    cpu, cpu_a_a = ratios([each.cpu_s for each in rounds])
    own_code = max((each.own_code["auto"] for each in found), key=lambda own: own.cpu_share)
    by_workers = {len(each): most_of(each) for each in ([one.own_code for one in found], many)}
    figures = [
        *ratio_figures("wall", wall),
        *ratio_figures("CPU", cpu),
        Figure("own code, share of CPU time", own_code.cpu_share, "at most", OWN_CODE_BAR),
        Figure("own code, share of wall time", own_code.wall_share, "at most", OWN_CODE_BAR),
        *(
            Figure(f"own code, microseconds per step, {workers} workers, {policy}", us(own))
            for workers, policies in by_workers.items()
            for policy, own in policies.items()
        ),
        Figure(
            "extra memory, buckets",
            memory.extra_bytes / memory.bucket_bytes,
            "at most",
            MEMORY_BAR,
        ),
    ]
    figures = judged(figures, effort)
    step_s = statistics.median(sum(each.wall_s[:2]) / 2 / _BLOCK_STEPS for each in rounds)
    context = {
        "rounds": len(rounds),
        "block_steps": _BLOCK_STEPS,
        "local_batch": found[0].local_batch,
        "step_ms": step_s * 1e3,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "intervals": {"wall": asdict(wall), "cpu": asdict(cpu)},
        "a_a": {"wall": asdict(wall_a_a), "cpu": asdict(cpu_a_a)},
        "own_code_ms": in_ms(own_code.wall_s),
        "own_code_cpu_ms": in_ms(own_code.cpu_s),
        "own_code_step_ms": own_code.step_wall_s * 1e3,
        "own_code_by_workers": {
            str(workers): {policy: in_ms(own.cpu_s) for policy, own in policies.items()}
            for workers, policies in by_workers.items()
        },
        "memory": asdict(memory),
    }
    if json:
        print(as_json("overhead", figures, context))
        return
    notes = {
        "wall ratio, Poise / DDP": str(wall),
        "wall ratio, A/A": str(wall_a_a),
        "CPU ratio, Poise / DDP": str(cpu),
        "CPU ratio, A/A": str(cpu_a_a),
        "own code, wall ms per step": own_code_note(own_code.wall_s),
        **{
            f"own code, CPU ms per step, {workers} workers, {policy}": own_code_note(own.cpu_s)
            for workers, policies in by_workers.items()
            for policy, own in policies.items()
        },
        "memory": f"{mib(memory.extra_bytes)} extra; largest bucket {mib(memory.bucket_bytes)}; "
        f"spread among equal processes {mib(memory.spread_bytes)}",
        "run": f"{len(rounds)} rounds of 3 x {_BLOCK_STEPS} steps, DDP step {step_s * 1e3:.1f} ms, "
        f"local batch {found[0].local_batch}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}",
    }
    show("Overhead of Poise on equal workers", figures, notes)


def own_code_note(sections_s: dict[str, float]) -> str:
    ms = in_ms(sections_s)
    beside = ", ".join(f"{name} {ms.pop(name, 0.0):.3f}" for name in (LAUNCH, WAITING))
    parts = (f"{name} {ms[name]:.3f}" for name in sorted(ms, key=ms.__getitem__, reverse=True))
    return f"{sum(ms.values()):.3f} ({', '.join(parts)}); not counted: {beside}"


def ratio_figures(name: str, ratio: Interval) -> list[Figure]:
    return [
        Figure(f"{name} ratio, lower end of 95 % interval", ratio.low, "at most", RATIO_BAR),
        Figure(f"{name} ratio, width of 95 % interval", ratio.width, "below", WIDTH_BAR),
    ]


def ratios(times_s: list[tuple[float, float, float]]) -> tuple[Interval, Interval]:
    """Return Poise / DDP and DDP / DDP."""
    first, second, poise = (list(column) for column in zip(*times_s, strict=True))
    both = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    return paired_ratio(poise, both), paired_ratio(second, first)


def measure_memory(amount: Amount, give_up: float) -> Memory:
    """Run pairs of processes of each kind in turn; at least one pair of each."""
    peaks: dict[Kind, list[int]] = {"ddp": [], "poise": []}
    kinds: tuple[Kind, Kind] = ("ddp", "poise")
    bucket = 0
    for run in range(amount.memory_runs):
        if run > 0 and time.time() > give_up:
            break
        for kind in kinds:
            limit_s = amount.limit_s + _START_S
            found = run_workers(peak_bytes, kind, workers=WORKERS, limit_s=limit_s)
            peaks[kind] += [peak for peak, _ in found]
            bucket = max(bucket, *(size for _, size in found))
    return Memory(peaks["ddp"], peaks["poise"], bucket)


def peak_bytes(kind: Kind) -> tuple[int, int]:
    """Return the peak of private memory of a process that runs one training, and DDP's bucket."""
    return_freed_memory()
    with training(kind, _MEMORY_LOCAL_BATCH, _MEMORY_HIDDEN) as one:
        one.run(_WARM_UP_STEPS)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        one.run(_MEMORY_STEPS)
        kib = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
        bucket = largest_bucket_bytes(one.model)
    # The kernel keeps the peak of the sum only; mapped library pages stay once they are there.
    peak, files = (int(kib[key].split()[0]) for key in ("VmHWM", "RssFile"))
    return (peak - files) * 1024, bucket


def return_freed_memory() -> None:
    """Make glibc return large blocks at once, so that the resident set is what is in use.

    By default it keeps freed blocks by a threshold that adapts, which makes equal processes
    differ by more than a bucket.
    """
    mmap_threshold, arena_max = -3, -8
    libc = ctypes.CDLL(None)
    if not (libc.mallopt(mmap_threshold, 65536) and libc.mallopt(arena_max, 1)):
        raise RuntimeError("mallopt refused its settings; the memory figure needs glibc")


def largest_bucket_bytes(model: object) -> int:
    """Return the size of DDP's largest bucket; 0 for a model that hides its DDP."""
    if not isinstance(model, DistributedDataParallel):
        return 0
    logged: Callable[[], dict[str, Any]] = model._get_ddp_logging_data
    sizes = str(logged()["rebuilt_bucket_sizes"])
    return max(int(size) for size in sizes.split(","))


def compare(amount: Amount, deadline: float) -> Comparison:
    """Run rounds of blocks until the intervals are narrow or the time is over (on a worker)."""
    local_batch = amount.local_batch or calibrated_local_batch()
    with ExitStack() as stack:
        kinds: tuple[Kind, Kind, Kind] = ("ddp", "ddp", "poise")
        trainings = [stack.enter_context(training(kind, local_batch)) for kind in kinds]
        for each in trainings:
            each.run(_WARM_UP_STEPS)
        rounds: list[Round] = []
        random = np.random.default_rng(0)
        while not decided_on_worker_0(lambda: is_enough(rounds, amount.rounds, deadline)):
            for _ in range(_CHECK_ROUNDS):
                rounds.append(one_round(trainings, random.permutation(len(trainings)).tolist()))
    return Comparison(local_batch, rounds, own_code_by_policy(local_batch, amount.own_steps))


def own_code_by_policy(local_batch: int, steps: int) -> dict[str, OwnCode]:
    """Measure our own code with each policy (on a worker)."""
    return {policy: measure_own_code(local_batch, policy, steps) for policy in POLICIES}


def measure_own_code(local_batch: int, policy: str, steps: int) -> OwnCode:
    watch = Stopwatch()
    model, optimizer, dataset = parts()
    ready = ReadySamples([dataset[number] for number in range(len(dataset))])
    with (
        borders(watch),
        poise_training(
            model, optimizer, ready, local_batch, policy=policy, collate_fn=collating(watch)
        ) as one,
    ):
        watched = Training(
            watch.timed(MODEL, partial(one.model)),
            one.optimizer,
            timed_batches(watch, one.batches),
        )
        watched.run(_WARM_UP_STEPS)
        dist.barrier()
        return measured(watch, watched.run, steps)


def timed_batches(
    watch: Stopwatch, batches: Iterator[tuple[Tensor, Tensor]]
) -> Iterator[tuple[Tensor, Tensor]]:
    following = watch.timed(LOADER, batches.__next__)
    while True:
        yield following()


def one_round(trainings: list[Training], order: list[int]) -> Round:
    wall_s, cpu_s = [0.0] * len(trainings), [0.0] * len(trainings)
    for place in order:
        dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        trainings[place].run(_BLOCK_STEPS)
        wall_s[place] = time.perf_counter() - wall
        cpu_s[place] = time.process_time() - cpu
    slowest, total = torch.tensor(wall_s), torch.tensor(cpu_s, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return Round(tuple(slowest.tolist()), tuple(total.tolist()))


def is_enough(rounds: list[Round], fewest: int, deadline: float) -> bool:
    if not rounds:
        return False
    if time.time() > deadline:
        return True
    wall, _ = ratios([each.wall_s for each in rounds])
    cpu, _ = ratios([each.cpu_s for each in rounds])
    return len(rounds) >= fewest and max(wall.width, cpu.width) < WIDTH_BAR


def decided_on_worker_0(decide: Callable[[], float]) -> float:
    """Return worker 0's number, on every worker."""
    number = torch.tensor(float(decide()) if dist.get_rank() == 0 else 0.0)
    dist.broadcast(number, 0)
    return number.item()


def calibrated_local_batch() -> int:
    """Find the local batch at which a step of plain DDP takes about 50 ms.

    A step takes slope * b + fixed seconds; two sizes show the line, and a size that falls outside
    the range shows it better.
    """
    known = {b: ddp_step_s(b) for b in (4, 16)}
    for _ in range(4):
        (b1, t1), (b2, t2) = sorted(known.items(), key=lambda e: abs(e[1] - _STEP_S))[:2]
        slope = max((t2 - t1) / (b2 - b1), 1e-5)
        local_batch = min(max(1, round(b1 + (_STEP_S - t1) / slope)), _SAMPLES // 8)
        if local_batch in known:
            break
        known[local_batch] = ddp_step_s(local_batch)
        if _STEP_RANGE_S[0] <= known[local_batch] <= _STEP_RANGE_S[1]:
            break
    return min(known, key=lambda b: abs(known[b] - _STEP_S))


def ddp_step_s(local_batch: int) -> float:
    with training("ddp", local_batch) as one:
        one.run(_WARM_UP_STEPS)
        times_s = []
        for _ in range(10):
            dist.barrier()
            start = time.perf_counter()
            one.run(2)
            times_s.append((time.perf_counter() - start) / 2)
    return decided_on_worker_0(lambda: statistics.median(times_s))


@contextmanager
def training(kind: Kind, local_batch: int, hidden: int = 256) -> Iterator[Training]:
    """Build a training of one kind; everything but the kind is alike."""
    model, optimizer, dataset = parts(hidden)
    if kind == "poise":
        with poise_training(model, optimizer, dataset, local_batch) as one:
            yield one
        return
    wrapped = DistributedDataParallel(model)
    yield Training(wrapped, optimizer, plain_batches(dataset, local_batch))


def parts(hidden: int = 256) -> tuple[nn.Module, Optimizer, TensorDataset]:
    torch.manual_seed(0)
    model = small_cnn(hidden)
    dataset = TensorDataset(
        torch.randn(_SAMPLES, 3, 32, 32), torch.randint(_CLASSES, size=(_SAMPLES,))
    )
    return model, SGD(model.parameters(), lr=0.01, momentum=0.9), dataset


@contextmanager
def poise_training(
    model: nn.Module,
    optimizer: Optimizer,
    dataset: Dataset[Any],
    local_batch: int,
    *,
    policy: str = "auto",
    collate_fn: Callable[..., Any] | None = None,
) -> Iterator[Training]:
    # Imported here: processes that measure the memory of plain DDP must not hold our code.
    from poise.torch import Balancer

    global_batch = local_batch * dist.get_world_size()
    loader = DataLoader(
        dataset, batch_size=global_batch, shuffle=True, drop_last=True, collate_fn=collate_fn
    )
    with Balancer(global_batch, policy=policy) as balancer:
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        batches = (batch for _ in balancer.epochs(sys.maxsize) for batch in shares)
        yield Training(shared, optimizer, batches)


def plain_batches(dataset: TensorDataset, local_batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=local_batch, sampler=sampler, drop_last=True)
    for epoch in range(sys.maxsize):
        sampler.set_epoch(epoch)
        yield from loader


def small_cnn(hidden: int) -> nn.Module:
    """Return a model that has 0.7 million parameters with 256 hidden units, in two buckets."""
    widths = (3, 32, 64, 128, 256)
    layers: list[nn.Module] = []
    for width_in, width_out in pairwise(widths):
        layers += [nn.Conv2d(width_in, width_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(1024, hidden), nn.ReLU(), nn.Linear(hidden, _CLASSES)]
    return nn.Sequential(*layers, *head)


def us(own: OwnCode) -> float:
    return own.own_cpu_s * 1e6


def in_ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: time_s * 1e3 for name, time_s in seconds.items()}


def mib(number: float) -> str:
    return f"{number / 2**20:.2f} MiB"


if __name__ == "__main__":
    main()
