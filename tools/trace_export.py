"""A trace for other programs: rows as CSV, and the predicted timeline as trace events."""

import json

from common import csv_text

from costmodel import timeline
from npinfer.errors import InputError

MAX_EVENTS = 200_000  # more is more than a viewer opens


def as_csv(result, detail):
    """The counts of a trace, a line for each phase, operation, layer or step."""
    rows = {
        "phase": [{"phase": phase, **result["counts"][phase]} for phase in ("prefill", "decode")],
        "op": result["operations"],
        "layer": result.get("layers"),
        "step": result.get("steps"),
    }[detail]
    return csv_text(rows[0], [row.values() for row in rows])


def as_chrome(ledger, devices):
    """The predicted timeline of each GPU in the trace-event format, which Perfetto opens; times are in microseconds.

    Format: Duret and Ruben, "Trace Event Format", complete events ("ph": "X").
    """
    n_events = len(devices) * len(ledger.by("forward", "op"))
    if n_events > MAX_EVENTS:
        raise InputError(f"--format chrome would hold {n_events:,} events, expected at most {MAX_EVENTS:,}; use fewer output tokens")
    events = []
    for number, (gpu, _, compute) in enumerate(devices):
        peak = gpu.matmul_flops_per_s.get(compute)
        if peak is None:
            raise InputError(f"--format chrome: {gpu.name} has no {compute} rate to time a prefill by; choose --compute")
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": gpu.name}})
        for event in timeline.timeline(ledger, gpu, peak):
            args = {"forward": event.forward, "bound": event.bound, **event.counts._asdict()}
            events.append({
                "ph": "X", "name": event.op, "cat": event.phase, "pid": number, "tid": 0,
                "ts": event.start_s * 1e6, "dur": event.duration_s * 1e6, "args": args,
            })  # fmt: skip
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
