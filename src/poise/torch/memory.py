"""The memory of an accelerator, as torch's allocator counts it."""

import torch

from poise.runtime.memory import HostMemory, Memory


class DeviceMemory:
    """The memory of this worker's accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        free, _ = torch.accelerator.get_memory_info(device)
        self.limit_bytes = float(free + torch.accelerator.memory_reserved(device))
        self.peak_bytes()

    def peak_bytes(self) -> float:
        """Return the peak since the last call."""
        peak = float(torch.accelerator.max_memory_allocated(self._device))
        torch.accelerator.reset_peak_memory_stats(self._device)
        return peak


def memory_of(device: torch.device, sharers: int) -> Memory:
    """Return the memory in which a worker on that device computes."""
    return HostMemory(sharers) if device.type == "cpu" else DeviceMemory(device)
