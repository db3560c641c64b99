"""A server whose workers are killed and join at random: `python -m tests.chaos MODE EVENTS SEED`.

Prints one JSON object: how often samples were pushed in each epoch, and the loss. Processes are
forked after torch is imported, which takes seconds; no thread runs in the one that forks.
"""

import json
import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from poise.engine.asp import AsyncEngine
from poise.engine.pool import Ranges
from poise.lab.processes import free_port
from poise.torch import Balancer
from poise.torch.asynchronous.role import Serving, serving_as

SAMPLES, GLOBAL_BATCH = 300, 24
MOST = 6
"""Workers at a time."""
PUSHES = mmap.mmap(-1, 8)
"""How many pushes the server has seen; all processes share it."""
_generator = torch.Generator().manual_seed(1)
INPUTS = torch.randn(SAMPLES, 8, generator=_generator)
TARGETS = (INPUTS[:, :3].sum(1) > 0).long()


def _pushes() -> int:
    return int.from_bytes(PUSHES[:8], "little")


def train(mode: str, enough: Callable[[int], bool]) -> tuple[nn.Module, Any]:
    """What all processes run."""
    torch.manual_seed(0)
    model = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), GLOBAL_BATCH, shuffle=True)
    with Balancer(GLOBAL_BATCH, mode=mode) as balancer:
        model, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for epoch in balancer.epochs(10**6):
            for inputs, targets in shares:
                nn.functional.cross_entropy(model(inputs), targets).backward()
                time.sleep(0.004 * random.random())
                optimizer.step()
                optimizer.zero_grad()
            if enough(epoch):
                break
    return model, balancer


def serve(mode: str, port: int, stop: str, report: int) -> None:
    """Run the server until it is told to stop, noting every push that counts."""
    pushed: dict[int, Counter[int]] = {}

    def noted(ranges: Ranges, epoch: int) -> None:
        for first, last in ranges:
            pushed.setdefault(epoch, Counter()).update(range(first, last))
        PUSHES[:8] = (_pushes() + 1).to_bytes(8, "little")

    alone, applied = AsyncEngine.pushed, AsyncEngine.applied

    def watched_push(self: AsyncEngine, worker: int, numbers: Any, **stated: Any) -> AsyncEngine:
        if mode == "async":
            for share in self.member(worker).shares(numbers):
                noted(share.ranges, share.epoch)
        return alone(self, worker, numbers, **stated)

    def watched_apply(self: AsyncEngine, step: int, staleness: Any) -> AsyncEngine:
        for number in self.groups[step].arrived.values():
            noted(self.pool.out[number], self.epoch)
        return applied(self, step, staleness)

    AsyncEngine.pushed = watched_push  # type: ignore[method-assign]
    AsyncEngine.applied = watched_apply  # type: ignore[method-assign]
    with serving_as(Serving(port=port, workers=2)):
        model, balancer = train(mode, lambda _: os.path.exists(stop))
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(INPUTS), TARGETS))
    found = {
        "epochs": len(pushed),
        "wrong": {
            epoch: dict(Counter(counts.values()))
            for epoch, counts in pushed.items()
            if counts != Counter(range(SAMPLES))
        },
        "loss": loss,
        "updates": balancer._training._course.engine.updates,
    }
    os.write(report, json.dumps(found).encode())


def fork(run: Callable[[], None]) -> int:
    """Run something in a process of its own."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def main(mode: str, events: int, seed: int, folder: str) -> dict[str, Any]:
    """Start everything, kill and add workers, and return what the server saw."""
    chance = random.Random(seed)
    torch.set_num_threads(1)
    port, stop = free_port(), f"{folder}/stop"
    reading, writing = os.pipe()
    server = fork(lambda: serve(mode, port, stop, writing))
    os.close(writing)
    os.environ["POISE_SERVER"] = f"127.0.0.1:{port}"

    def work() -> None:
        random.seed(os.getpid())
        train(mode, lambda _: False)

    def await_pushes(more: int) -> None:
        """Wait until so many more are made, or nobody is there to make them."""
        target = _pushes() + more
        while alive and _pushes() < target:
            time.sleep(0.002)

    alive = [fork(work) for _ in range(3)]
    killed = joined = 0
    try:
        while killed + joined < events:
            await_pushes(chance.randint(1, 12))
            if alive and (chance.random() < 0.5 or len(alive) == MOST):
                victim = alive.pop(chance.randrange(len(alive)))
                os.kill(victim, signal.SIGKILL)
                os.waitpid(victim, 0)
                killed += 1
            else:
                alive.append(fork(work))
                joined += 1
        alive.append(fork(work))
        await_pushes(3 * SAMPLES // GLOBAL_BATCH)
        open(stop, "w").close()
        code = os.waitstatus_to_exitcode(os.waitpid(server, 0)[1])
    finally:
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    found: dict[str, Any] = json.loads(os.read(reading, 10**6))
    return {**found, "code": code, "killed": killed, "joined": joined}


if __name__ == "__main__":
    signal.alarm(110)  # a hang ends it
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
