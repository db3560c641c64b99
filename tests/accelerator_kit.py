"""A kit for owners of accelerators: `make test-accelerator` runs it and prints a report.

The machines that build Poise have none, so what needs one is tried on fakes there. This kit tries
it for real: exactness, measuring, lost workers with the device's own backend, and a worker on an
accelerator beside one on the CPU. `--device cpu` tries the kit itself.
"""

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import poise
from poise.core.order import Order
from poise.torch import Balancer, Fixed
from poise.torch.devices import clock_of
from tests.cluster import Fault, Workers
from tests.inside import session_of

SAMPLES, STEPS, BATCH = 240, 20, 12
EXACT = 1e-9


def main() -> int:
    """Run all checks; 0 if there is no accelerator, or if all hold."""
    parser = argparse.ArgumentParser(prog="make test-accelerator", description=__doc__)
    parser.add_argument("--device", help="the type of device; without it, the accelerator's")
    stated = parser.parse_args().device
    kind = torch.accelerator.current_accelerator(check_available=True)
    device = stated or (None if kind is None else kind.type)
    if device is None:
        print("no accelerator: nothing to test on this machine")
        return 0
    here = 2 if device == "cpu" else torch.accelerator.device_count()
    print(f"Poise {poise.__version__}, torch {torch.__version__}, {here} x {device}")
    workers = Workers(max(here, 2))
    try:
        held = [
            check("a clock that measures the device", clock_measures, device),
            check("exact on one device", exact, workers, [device]),
            check("exact beside a worker on the CPU", exact, workers, [device, "cpu"]),
        ]
        if here > 1:
            several = [device] * here
            held += [
                check(f"exact on {here} devices", exact, workers, several),
                check("steps are measured", measured, workers, several),
                check("a lost worker is named", lost, workers, several),
            ]
        else:
            print("skipped  all that needs two devices")
    finally:
        workers.close()
    print(f"{sum(held)} of {len(held)} hold; please report this output, with the device's name")
    return 0 if all(held) else 1


def check(name: str, case: Callable[..., str], *args: Any) -> bool:
    """Run a check; an empty answer means that it holds."""
    try:
        wrong = case(*args)
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    print(f"{'FAILED ' if wrong else 'holds  '}  {name}{f': {wrong}' if wrong else ''}", flush=True)
    return not wrong


def place(devices: list[str], worker: int) -> torch.device:
    """Return a worker's device; accelerators are numbered by worker."""
    kind = devices[worker]
    return torch.device(kind) if kind == "cpu" else torch.device(kind, worker)


def model_and_data() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    return model, (torch.randn(SAMPLES, 8).double(), torch.randn(SAMPLES, 4).double())


def train(devices: list[str], policy: Any, fault: Fault | None = None) -> Any:
    """Train on this worker's device; return the weights, and how many steps were measured."""
    model, data = model_and_data()
    with Balancer(BATCH, policy=policy, hang_s=60) as balancer:
        device = place(devices, balancer.worker)
        model = model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        loader = DataLoader(TensorDataset(*data), BATCH, shuffle=True)
        shared, optimizer, shares = balancer.prepare(model, optimizer, loader)
        for step, (inputs, targets) in enumerate(shares):
            if fault is not None:
                fault.strike(balancer.worker, step)
            loss = nn.functional.mse_loss(shared(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        knows = balancer.worker == 0 and session_of(balancer).exchange.forecast() is not None
        backend = str(dist.get_backend(session_of(balancer).generation.gradients))
    return {name: value.cpu() for name, value in model.state_dict().items()}, knows, backend


def exact(workers: Workers, devices: list[str]) -> str:
    """Compare with one plain process on the CPU."""
    model, (inputs, targets) = model_and_data()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    order = torch.from_numpy(Order(length=SAMPLES, seed=0).at(0, SAMPLES))
    for start in range(0, SAMPLES, BATCH):
        batch = order[start : start + BATCH]
        nn.functional.mse_loss(model(inputs[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    split = [BATCH - 2 * (len(devices) - 1), *[2] * (len(devices) - 1)]
    for weights, _, backend in workers.run(train, devices, Fixed(split), workers=len(devices)):
        far = max(float((weights[n] - v).abs().max()) for n, v in model.state_dict().items())
        if far > EXACT:
            return f"weights differ by {far:.1e} with {backend}"
    return ""


def measured(workers: Workers, devices: list[str]) -> str:
    """See that worker 0 has learned a speed of everybody."""
    found = workers.run(train, devices, "auto", workers=len(devices))
    return "" if found[0][1] else "no speeds were learned in 20 steps"


def lost(workers: Workers, devices: list[str]) -> str:
    """Kill one worker, and see who is blamed."""
    fault = Fault(worker=1, step=5, kind="kill")
    policy = Fixed([BATCH - len(devices) + 1, *[1] * (len(devices) - 1)])
    outcomes = workers.attempt(train, devices, policy, fault, workers=len(devices))
    blamed = [each.error for number, each in enumerate(outcomes) if number != 1]
    wrong = [error for error in blamed if "worker 1" not in error]
    return wrong[0] if wrong else ""


def clock_measures(device: str) -> str:
    """Compare the device's clock with the host's, around work that is waited for."""
    clock = clock_of(torch.device(device))
    matrix = torch.randn(1500, 1500, device=device)
    begin_s, start = time.perf_counter(), clock.mark()
    for _ in range(5):
        matrix = torch.tanh(matrix @ matrix)
    end = clock.mark()
    float(matrix.sum())
    host_s = time.perf_counter() - begin_s
    if not clock.passed(end):
        return "a mark has not passed after the device was waited for"
    between_s = clock.between_s(start, end)
    possible = 0 < between_s <= 1.05 * host_s
    return "" if possible else f"{between_s:.4f} s between marks, and {host_s:.4f} s by the host"


if __name__ == "__main__":
    sys.exit(main())
