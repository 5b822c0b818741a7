"""Floor, roofline and the textbook's estimates: from the counts of a phase to seconds.

    floor      max(needed matmul FLOPs / peak, (weight + KV bytes) / bandwidth) of
               the whole phase: nothing that computes in the stated format beats it;
               of experts those of one token, the fewest that a forward can touch
    roofline   the sum over operations of max(needed matmul FLOPs / peak,
               elementwise FLOPs / vector peak, bytes without scores / bandwidth);
               as many experts as tokens are expected to touch

Read `Phase` (the counts of prefill or decode, by operation), then `floor_s` and `roofline_s`.

Source of the model: Williams, Waterman and Patterson 2009, "Roofline", CACM 52(4), 65-76.
"""

from math import fsum
from typing import NamedTuple

ETA = 0.6  # share of the peak in the rough estimates, the textbook's; section 9


class Level(NamedTuple):
    """One answer to how long it takes; None where a rate is missing or there is nothing to time.

    Attributes
    ----------
    ttft_s, tpot_s : float or None
    latency_s : float or None
        ttft + tpot * n_output, the textbook's line.
    latency_exact_s : float or None
        ttft + tpot * (n_output - 1): what the request takes.
    tokens_per_s : float or None
        n_output / latency_s, of one sequence.
    prefill_bound, decode_bound : {"compute", "bandwidth"} or None
    """

    ttft_s: float | None
    tpot_s: float | None
    latency_s: float | None
    latency_exact_s: float | None
    tokens_per_s: float | None
    prefill_bound: str | None
    decode_bound: str | None


class Rough(NamedTuple):
    """The textbook's estimates, 2 FLOPs a parameter and token at eta * peak, beside their error.

    Of experts, the parameters and the bytes are those of one token.

    Attributes
    ----------
    prefill_flops, decode_flops : int
        2*B*L*P and 2*B*C*P, P the streamed parameters.
    prefill_flops_error, decode_flops_error : float or None
        Relative to the exact needed FLOPs of the phase.
    tpot_compute_s, tpot_bandwidth_s, tpot_s : float or None
        From FLOPs, from weight bytes, and the larger of the two; None if there is no decode step.
    """

    eta: float
    n_params: int
    prefill_flops: int
    decode_flops: int
    prefill_flops_error: float
    decode_flops_error: float | None
    ttft_s: float | None
    tpot_s: float | None
    tpot_compute_s: float | None
    tpot_bandwidth_s: float | None


class Phase(NamedTuple):
    """Prefill or decode: the `Cost` of each operation, sampling included, its sums, and the number of forwards.

    `least_bytes` are the streamed bytes without the experts that some other routing would not touch.
    """

    costs: list
    n_forwards: int
    needed_flops: int
    streamed_bytes: int
    least_bytes: int

    @classmethod
    def of(cls, costs, n_forwards, surplus_bytes=0):
        streamed = sum([cost[2] for cost in costs])
        return cls(costs, n_forwards, sum([cost[0] for cost in costs]), streamed, streamed - surplus_bytes)

    @property
    def intensity(self):
        """Needed matmul FLOPs for each byte of weights and KV moved; None for a phase without forwards."""
        return self.needed_flops / self.streamed_bytes if self.n_forwards else None


def floor_s(phase, gpu, peak):
    """Seconds below which a phase cannot end, and what bounds it."""
    compute = phase.needed_flops / peak
    bandwidth = phase.least_bytes / gpu.memory_bytes_per_s
    return (compute, "compute") if compute > bandwidth else (bandwidth, "bandwidth")


def roofline_s(phase, gpu, peak):
    """Seconds of a phase whose operations run one after the other, each at its own bound; and what bounds most of it."""
    vector_peak, bytes_per_s = gpu.vector_flops_per_s or float("inf"), gpu.memory_bytes_per_s
    compute, bandwidth = [], []
    for needed_flops, elementwise_flops, _, moved_bytes in phase.costs:
        computing, moving = needed_flops / peak, moved_bytes / bytes_per_s
        if elementwise_flops / vector_peak > computing:
            computing = elementwise_flops / vector_peak
        if computing > moving:
            compute.append(computing)
        else:
            bandwidth.append(moving)
    bound = "compute" if fsum(compute) > fsum(bandwidth) else "bandwidth"
    # A sum of maxima is never below the maximum of sums, but its rounding may be.
    return max(fsum(compute + bandwidth), floor_s(phase, gpu, peak)[0]), bound


def times(ttft_s, tpot_s, n_output):
    """The five times of a level, None where they depend on one that is."""
    if ttft_s is None or tpot_s is None:
        return ttft_s, tpot_s, None, ttft_s if n_output == 1 else None, None
    latency_s = ttft_s + tpot_s * n_output  # as formulas.latency_s and its kin, whose checks take longer than they
    return ttft_s, tpot_s, latency_s, latency_s - tpot_s, n_output / latency_s


def level(seconds_of, prefill, decode, gpu, peak, n_output, exchange_s=(0.0, 0.0)):
    """A `Level` from a function of phase, GPU and matmul rate; and the seconds that devices exchange sums in."""
    ttft_s, prefill_bound = seconds_of(prefill, gpu, peak) if peak else (None, None)
    tpot_s = decode_bound = None
    if decode.n_forwards:
        # Without a matmul rate decode is still bound from below by what it streams.
        seconds, decode_bound = seconds_of(decode, gpu, peak or float("inf"))
        tpot_s = (seconds + exchange_s[1]) / decode.n_forwards
    return Level(*times(ttft_s and ttft_s + exchange_s[0], tpot_s, n_output), prefill_bound, decode_bound)


def rough(n_params, streamed_bytes, gpu, peak, prefill, decode, n_prompt, n_output, batch):
    """`Rough` of a request: of what one token uses, the parameters and the bytes."""
    prefill_flops, decode_flops = 2 * batch * n_prompt * n_params, 2 * batch * n_output * n_params
    bandwidth_s = streamed_bytes / gpu.memory_bytes_per_s
    effective = ETA * peak if peak else None
    compute_s = decode_flops / n_output / effective if peak else None
    steps = decode.n_forwards > 0
    return Rough(
        eta=ETA,
        n_params=n_params,
        prefill_flops=prefill_flops,
        decode_flops=decode_flops,
        prefill_flops_error=prefill_flops / prefill.needed_flops - 1,
        decode_flops_error=decode_flops / decode.needed_flops - 1 if steps else None,
        ttft_s=prefill_flops / effective if peak else None,
        tpot_s=max(bandwidth_s, compute_s or 0.0) if steps else None,
        tpot_compute_s=compute_s if steps else None,
        tpot_bandwidth_s=bandwidth_s if steps else None,
    )
