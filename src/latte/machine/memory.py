"""Resident memory of this process: now, and at its peak since a moment of one's choice."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path


def peak_bytes() -> int:
    """The largest resident memory of this process since its start or :func:`reset_peak`.

    VmHWM, where there is one: the maximum of ``getrusage`` is inherited from the process that
    started this one.
    """
    peak = _status_bytes("VmHWM")
    if peak is None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return peak


def resident_bytes() -> int:
    """Resident memory of this process now; the peak where the system does not tell."""
    return _status_bytes("VmRSS") or peak_bytes()


def reset_peak() -> None:
    """Start the peak anew from what is resident now, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(field: str) -> int | None:
    """A field of /proc/self/status in bytes; None where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(x.split()[1]) * 1024 for x in lines if x.startswith(f"{field}:")), None)
