"""When each operation of a run is predicted to begin and end, one after the other: the roofline laid out in time."""

from typing import NamedTuple

from costmodel.levels import Phase, roofline_s
from costmodel.operations import Cost


class Event(NamedTuple):
    """One operation of one forward, all its layers together; `bound` is "compute" or "bandwidth"."""

    phase: str
    forward: int
    op: str
    start_s: float
    duration_s: float
    bound: str
    counts: object


def timeline(ledger, gpu, peak):
    """Every `Event` of a ledger on a device, from 0 s on.

    Parameters
    ----------
    ledger : npinfer.Ledger
    gpu : GPU
    peak : float
        Matmul rate of the format used, FLOPs per second.

    Yields
    ------
    Event
        Durations of the prefill add up to the roofline's TTFT.
    """
    now_s = 0.0
    for (phase, forward, op), (_, counts) in ledger.by("phase", "forward", "op").items():
        if op == "cache_load":  # the interpreter's own copy
            continue
        duration_s, bound = roofline_s(Phase.of([Cost.of(counts)], 1), gpu, peak)
        yield Event(phase, forward, op, now_s, duration_s, bound, counts)
        now_s += duration_s
