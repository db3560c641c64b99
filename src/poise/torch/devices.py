"""Devices: what tells fast ones from slow ones."""

import os
import platform
import socket
from pathlib import Path

import torch

from poise.runtime.generation import Member


def member_on(device: torch.device) -> Member:
    """Return this process as a worker that computes on a device."""
    host = socket.gethostname()
    return Member(f"{host}:{os.getpid()}", device_kind(device), host)


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
