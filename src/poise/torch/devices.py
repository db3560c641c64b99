"""Devices: what tells fast ones from slow ones."""

import platform
from pathlib import Path

import torch


def device_kind(device: torch.device) -> str:
    """Return what tells fast devices from slow ones: the name of the model.

    >>> device_kind(torch.device("cpu")).endswith("threads")
    True
    """
    if device.type == "cpu":
        return f"{_processor()}, {torch.get_num_threads()} threads"
    module = torch.get_device_module(device)
    name = getattr(module, "get_device_name", lambda _: device.type)
    return str(name(device))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
