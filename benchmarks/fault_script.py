"""The training that something goes wrong in.

`python fault_script.py FOLDER KIND VICTIM STEP LOADERS`
Each worker writes what it says to a pipe of its own in the folder, so that whoever reads there
knows when it was said, whichever launcher started the worker.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path

SILENT_S = 5.0
STEPS = 400


def strike(kind: str) -> None:
    """Let something go wrong in this process."""
    sys.stderr.write(f"fault {time.time()}\n")
    sys.stderr.flush()
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop" | "brief stop" | "store host":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise ValueError("injected fault")
        case "exit":
            sys.exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "out of memory":
            import torch

            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used, used))
            torch.ones(2**31)
        case "launcher" | "cut link":
            pass  # done from outside, as soon as the line above is read


def main() -> None:
    """Train."""
    folder, kind, victim, at, loaders = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    worker = int(os.environ["RANK"])
    os.dup2(os.open(f"{folder}/{worker}", os.O_WRONLY), 2)
    sys.stderr.write(f"pid {os.getpid()}\n")
    sys.stderr.flush()

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from poise.torch import Balancer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    data = TensorDataset(torch.randn(12 * STEPS, 32), torch.randint(0, 4, (12 * STEPS,)))
    balancer = Balancer(12, silent_s=SILENT_S)
    loader = DataLoader(data, 12, shuffle=True, num_workers=loaders)
    model, optimizer, loader = balancer.prepare(model, optimizer, loader)
    for step, (x, y) in enumerate(loader):
        if (worker, step) == (victim, at):
            strike(kind)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step > at + 20 and kind == "brief stop":
            break
        time.sleep(0.01)
    sys.stderr.write("finished\n")


if __name__ == "__main__":
    main()
