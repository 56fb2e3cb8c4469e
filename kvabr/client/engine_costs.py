"""Prefill costs of a client's engines, kept between processes in a file next to the decode rates."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import torch

from kvabr.client.machine_file import MachineFile
from kvabr.client.prefill_timings import PrefillTimings, Timing, read_rows
from kvabr.client.resources import timings_of
from kvabr.types.engine import Engine
from kvabr.types.once import once

COSTS_FILE = "prefill-costs.json"
"""File name in the folder of a client or user."""


class EngineCosts:
    """The file, and the timings that it completed. Thread-safe."""

    def __init__(self, path: Path | None = None) -> None:
        """Read the file if it exists; never raises. Without a path, timings are not saved."""
        self._file: MachineFile[list[Timing]] = MachineFile(path, "prefill_costs", read_rows)
        self._lock = threading.Lock()

    def of(self, engine: Engine) -> PrefillTimings:
        """Return the engine's prefill timings, of this process and earlier ones."""
        timings = timings_of(engine)
        return self.restored(timings, engine_key(engine)) if timings.empty else timings

    def restored(self, timings: PrefillTimings, key: str) -> PrefillTimings:
        """Return timings; if empty, restored from the file's entry for a key."""
        if timings.empty and (rows := self._file.get(key)):
            timings.restore(rows)
        return timings

    def save(self, timings: PrefillTimings, key: str) -> None:
        """Save new timings under a key if there is a file; never raises."""
        if self._file.path is None:
            return
        with self._lock:
            if timings.news:
                self._file.keep(key, timings.rows())

    def save_engine(self, engine: Engine) -> None:
        """Save an engine's timings, and fit its cost to them, which is slow."""
        timings = timings_of(engine)
        self.save(timings, engine_key(engine))
        timings.cost()


@once
def costs_at(path: Path | None) -> EngineCosts:
    """Return the one `EngineCosts` of this process for a file."""
    return EngineCosts(path)


def engine_key(engine: Engine) -> str:
    """Return the key of an engine's timings: model, device and kind of engine."""
    kind, device = type(engine), getattr(engine, "device", None)
    own = f"{getattr(engine, 'dtype', '')} {getattr(engine, 'weights', '')}"
    return cost_key(engine.spec.digest().hex(), f"{kind.__module__}.{kind.__qualname__} {own}", device)


def cost_key(model: str, engine: str, device: torch.device | None) -> str:
    """Return the key of a model on an engine and a device; None: the processor."""
    where = f"{'cpu' if device is None else device.type} {torch.get_num_threads()}"
    if device is not None and device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # the device is gone
            where = torch.cuda.get_device_name(device)
    return f"{model}:{engine}:{where}"
