"""Clock and power of a GPU while something runs on it, read from NVML by a thread of its own.

Owns the sampling. Knows nothing of what is measured. Without the nvidia-ml-py package, or where the driver does not answer,
there are no samples and the figures are None.
"""

from __future__ import annotations

import statistics
import threading
from types import TracebackType
from typing import Any

import torch

__all__ = ["PowerMeter"]

EVERY_S = 0.01


class PowerMeter:
    """`with PowerMeter(device) as meter: ...`; then `meter.clock_mhz` (of the multiprocessors) and `meter.power_w`: medians of
    the samples taken meanwhile, None without any."""

    def __init__(self, device: torch.device) -> None:
        self._handle = _handle(device)
        self._stop = threading.Event()
        self._samples: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._sample, daemon=True)

    @property
    def clock_mhz(self) -> float | None:
        return statistics.median(clock for clock, _ in self._samples) if self._samples else None

    @property
    def power_w(self) -> float | None:
        return statistics.median(power for _, power in self._samples) if self._samples else None

    def __enter__(self) -> PowerMeter:
        if self._handle is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        if self._handle is not None:
            self._thread.join()

    def _sample(self) -> None:
        import pynvml

        while not self._stop.wait(EVERY_S):
            try:
                clock = pynvml.nvmlDeviceGetClockInfo(self._handle, pynvml.NVML_CLOCK_SM)
                self._samples.append((float(clock), _power_w(pynvml, self._handle)))
            except pynvml.NVMLError:
                return


def _handle(device: torch.device) -> Any:
    """NVML's handle of a CUDA device, found by its UUID; None where NVML does not answer."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except pynvml.NVMLError:
        return None


def _power_w(pynvml: Any, handle: Any) -> float:
    """Watts now; a second's mean on drivers that know no more."""
    (value,) = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])
    if value.nvmlReturn == pynvml.NVML_SUCCESS:
        return float(value.value.uiVal) / 1e3
    return float(pynvml.nvmlDeviceGetPowerUsage(handle)) / 1e3
