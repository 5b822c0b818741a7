"""This machine as a device: its rates measured, and written as a GPU profile like any other.

The interpreter computes in float32 whatever the format, so that the rates of
all formats are those of float32 products; predictions of a run are of its bytes
only where these are float32 too (--weights fp32 --kv fp32 --activations fp32).
"""

import os
import platform

from costmodel import measure

BANDWIDTH_SIZES = (2**15, 2**17, 2**19, 2**21, 2**23, 2**25, 2**27, 2**29)
PRODUCT_ROWS = 512


def measured():
    """Rates of this machine.

    Returns
    -------
    dict
        The number keys of a GPU profile, and "bandwidths": bytes per second by bytes streamed.
    """
    bandwidths = {size: measure.streaming_bytes_per_s(size) for size in BANDWIDTH_SIZES}
    product = measure.matmul_flops_per_s(PRODUCT_ROWS)
    interpreter, vector = measure.interpreter(bandwidths[max(bandwidths)], product)
    return {
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "memory_bytes_per_s": bandwidths[max(bandwidths)],
        "matmul_flops_per_s": {name: product for name in ("fp32", "fp16", "bf16")},
        "vector_flops_per_s": vector,
        "last_level_cache_bytes": _last_level(),
        "interpreter": interpreter,
        "bandwidths": bandwidths,
    }


def _last_level():
    """Bytes of the largest cache that the system tells of, or None."""
    folder, sizes = "/sys/devices/system/cpu/cpu0/cache", []
    try:
        for index in os.listdir(folder):
            with open(os.path.join(folder, index, "size"), encoding="ascii") as file:
                text = file.read().strip()
            sizes.append(int(text.rstrip("KM")) * {"K": 2**10, "M": 2**20}.get(text[-1], 1))
    except (OSError, ValueError):
        return max(sizes, default=None)
    return max(sizes, default=None)


def as_profile(rates, date):
    """The rates as the text of a TOML profile that `costmodel.gpu` reads."""
    lines = ["# This machine, measured by tools/calibrate.py host."]
    lines += [f"#   streams {size / 2**20:g} MiB at {rate / 1e9:.1f} GB/s" for size, rate in rates["bandwidths"].items()]
    lines += ["", "[host]"]
    for key in ("memory_bytes", "memory_bytes_per_s", "vector_flops_per_s", "last_level_cache_bytes"):
        if rates[key] is not None:
            lines.append(f"{key} = {rates[key]:.6g}" if isinstance(rates[key], float) else f"{key} = {rates[key]}")
    for key in ("matmul_flops_per_s", "interpreter"):
        inside = ", ".join([f"{name} = {rate:.6g}" for name, rate in rates[key].items()])
        lines.append(f"{key} = {{ {inside} }}")
    cpu = platform.processor() or platform.machine()
    lines.append(f'source = "measured by tools/calibrate.py host on {date}: {cpu}, {os.cpu_count()} CPUs"')
    return "\n".join(lines) + "\n"
