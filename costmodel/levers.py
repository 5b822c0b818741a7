"""What can be changed about a request, and what is known to change it to: the levers of `costmodel.advice`."""

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from costmodel.prediction import device, predict
from costmodel.profiles import GPU, gpus
from costmodel.profiles import gpu as gpu_profile
from npinfer.formats import FORMATS, Precision


class Request(NamedTuple):
    """The arguments of `predict`; levers replace one of them."""

    config: object
    precision: Precision
    gpu: GPU
    n_prompt: int
    n_output: int
    batch: int = 1
    n_cached: int = 0
    engine: str = "generic"
    n_gpus: int = 1
    compute: str | None = None

    def predict(self):
        return predict(**self._asdict())

    @property
    def compute_format(self):
        """Format whose matmul rate is used."""
        return self._device()[2]

    def _device(self):
        return device(self.config, self.precision, self.gpu, self.engine, self.n_gpus, self.compute)

    @property
    def peak(self):
        """Matmul rate of the format used, or None."""
        gpu, _, compute = self._device()
        return gpu.matmul_flops_per_s.get(compute)

    @property
    def beyond_positions(self):
        """Whether the request is longer than the positions that its model has learned, if it learns them."""
        return self.config.learned_positions and self.n_prompt + self.n_output - 1 > self.config.max_context


class Lever(NamedTuple):
    """One thing to change: the request before and after it, or why there is nothing to change."""

    name: str
    before: Request | None = None
    after: Request | None = None
    why_not: str | None = None


def levers(now):
    """Every `Lever` on the latency of a request, in the order of the textbook: cache, formats, devices."""
    prefix, half = "prefix cache, half the prompt", now.n_prompt // 2
    if now.peak is None:
        yield Lever(prefix, why_not="the profile lacks the matmul rate that times a prefill")
    elif half:
        yield Lever(prefix, now, now._replace(n_cached=half))
    else:
        yield Lever(prefix, why_not="the prompt's only token is always computed")
    yield from _formats(now)
    for quantity in ("bandwidth", "matmul rate"):
        name, better = f"next higher {quantity}", _next_gpu(now, quantity)
        if better is None:
            yield Lever(name, why_not="no profile is known to have more, and room for the request")
        else:
            yield Lever(f"{name}, {better.name}", now, now._replace(gpu=better))


def _stored(precision, weights):
    """All weights in one format, whatever single tensors had."""
    return replace(precision, weights=weights, bits_per_weight=None, exceptions=())


def _formats(now):
    precision = now.precision
    for name in ("int8", "int4"):
        if FORMATS[name].bits < precision.matrices.bits:
            yield Lever(f"{name} weights", now, now._replace(precision=_stored(precision, name)))
        else:
            yield Lever(f"{name} weights", why_not=f"weights have {precision.matrices.bits:g} bits already")
    if precision.kv.bits <= 8:
        yield Lever("8-bit KV", why_not=f"KV has {precision.kv.bits} bits already")
        return
    int8, fp8 = [now._replace(precision=replace(precision, kv=name)) for name in ("int8", "fp8")]
    yield Lever("int8 KV", now, int8)
    if fp8.predict().roofline != int8.predict().roofline:
        yield Lever("fp8 KV", now, fp8)


def _next_gpu(now, quantity):
    """The GPU with the next higher rate on which the request fits; of equals the better one otherwise."""
    needed = now.predict().memory_bytes_needed
    compute = now.compute_format

    def rates(gpu):
        both = gpu.memory_bytes_per_s, gpu.matmul_flops_per_s.get(compute)
        return both if quantity == "bandwidth" else both[::-1]

    if None in rates(now.gpu)[:1]:
        return None
    known = [gpu for gpu in _profiles() if None not in rates(gpu) and needed <= now.n_gpus * gpu.memory_bytes]
    higher = [gpu for gpu in known if rates(gpu)[0] > rates(now.gpu)[0]]
    return min(higher, key=lambda gpu: (rates(gpu)[0], -rates(gpu)[1], gpu.memory_bytes, gpu.name), default=None)


@lru_cache(maxsize=1)
def _profiles():
    return [gpu_profile(name) for name in gpus()]


def what_fits(now):
    """Single changes (and both formats together) with which the request fits its GPU, or the least GPU that holds it."""
    changes = [(lever.name, lever.after) for lever in _formats(now) if lever.after is not None and lever.name != "fp8 KV"]
    smallest = replace(_stored(now.precision, "int4"), kv="int8")
    changes.append(("int4 weights and int8 KV", now._replace(precision=smallest)))
    if now.batch > 1:
        changes.append(("batch 1", now._replace(batch=1)))
    needed = now.predict().memory_bytes_needed
    larger = [gpu for gpu in _profiles() if now.n_gpus * gpu.memory_bytes >= needed]
    if larger:
        gpu = min(larger, key=lambda gpu: (gpu.memory_bytes, -gpu.memory_bytes_per_s, gpu.name))
        changes.append((gpu.name, now._replace(gpu=gpu)))
    fitting = []
    for name, request in changes:
        prediction = request.predict()
        if prediction.fits:
            memory = {"memory_bytes_needed": prediction.memory_bytes_needed, "memory_bytes": prediction.gpu.memory_bytes}
            fitting.append({"change": name, **memory})
    return fitting
