"""The Llama family written a second time: float64, no cache, no ledger, one sequence, one head at a time.

An answer that is independent of the package: it shares tensors with it (a
dict by their names) and nothing else.  `logits` is the model; the functions
above it are its parts and the storage formats, each from its definition.
"""

import math
import struct

import numpy as np

# ---- storage formats


def bf16(value):
    """The nearest of the float32 numbers whose lower 16 bits are zero, ties to an even upper half."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    below, above = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in (bits >> 16, (bits >> 16) + 1)]
    if abs(value - below) == abs(above - value):
        return below if (bits >> 16) % 2 == 0 else above
    return below if abs(value - below) < abs(above - value) else above


ROUND = {
    "fp32": np.float64,
    "fp16": lambda array: array.astype(np.float16).astype(np.float64),
    "bf16": np.vectorize(bf16, otypes=[np.float64]),
}


def int8(matrix):
    """Each row (an output channel, a vocabulary row) as whole numbers from -127 to 127 times an fp16 scale."""
    return np.array([whole_numbers(row.tolist(), 127) for row in matrix])


def int4(matrix):
    """Each 128 values of a row, or what is left at its end, as whole numbers from -7 to 7 times an fp16 scale."""
    groups = [[row[at : at + 128].tolist() for at in range(0, len(row), 128)] for row in matrix]
    return np.array([sum([whole_numbers(group, 7) for group in row], []) for row in groups])


def whole_numbers(values, largest):
    scale = float(np.float16(max(map(abs, values)) / largest))
    return [scale * max(-largest, min(largest, round(value / scale))) if scale else 0.0 for value in values]


def stored(tensors, weights):
    """Tensors as a format holds them, float64; gains and biases stay at 16 bits beside int8 and int4."""
    quantised = {"int8": int8, "int4": int4}

    def hold(array):
        if weights in quantised:
            return quantised[weights](array) if array.ndim == 2 else ROUND["fp16"](array)
        return ROUND[weights](array)

    return {key: hold(array) for key, array in tensors.items()}


# ---- the model


def norm(row, gain, eps):
    return row / math.sqrt(sum(value * value for value in row) / len(row) + eps) * gain


def frequency(pair, config):
    """Radians a position turns a pair by; the llama3 stretching as its release words it, by wavelength."""
    turn = config.rope_theta ** (-2 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return turn
    wavelength = 2 * math.pi / turn
    if wavelength < scaling.original_max_context / scaling.high_freq_factor:
        return turn
    if wavelength > scaling.original_max_context / scaling.low_freq_factor:
        return turn / scaling.factor
    smooth = (scaling.original_max_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * turn / scaling.factor + smooth * turn


def rotate(head, position, config):
    """Element i and element i + head_dim / 2 are a point of the plane, turned about the origin."""
    half = config.head_dim // 2
    out = np.empty(config.head_dim)
    for pair in range(half):
        turned = complex(head[pair], head[pair + half]) * np.exp(1j * position * frequency(pair, config))
        out[pair], out[pair + half] = turned.real, turned.imag
    return out


def attend(queries, keys, values, window):
    """One head: every query over the keys up to its own, the `window` last of them."""
    out = np.empty_like(queries)
    for i, query in enumerate(queries):
        first = 0 if window is None else max(0, i - window + 1)
        scores = keys[first : i + 1] @ query / math.sqrt(len(query))
        weights = np.exp(scores - scores.max())
        out[i] = weights / weights.sum() @ values[first : i + 1]
    return out


def project(x, tensors, layer, name):
    return x @ tensors[name, layer].T + tensors.get((name + ".bias", layer), 0)


def keys_and_values(x, tensors, layer, config):
    """K after rotation and V, each (n_kv_heads, T, head_dim), of layer inputs x (T, d_model)."""
    h = np.stack([norm(row, tensors["attn_norm", layer], config.norm_eps) for row in x])
    k, v = [
        project(h, tensors, layer, name).reshape(len(x), config.n_kv_heads, config.head_dim).swapaxes(0, 1)
        for name in ("k_proj", "v_proj")
    ]
    return h, np.stack([[rotate(row, position, config) for position, row in enumerate(head)] for head in k]), v


def layer_output(x, tensors, layer, config):
    h, keys, values = keys_and_values(x, tensors, layer, config)
    q = project(h, tensors, layer, "q_proj")
    heads = []
    for head in range(config.n_heads):
        rows = q[:, head * config.head_dim : (head + 1) * config.head_dim]
        rows = np.stack([rotate(row, position, config) for position, row in enumerate(rows)])
        shared = head // (config.n_heads // config.n_kv_heads)
        heads.append(attend(rows, keys[shared], values[shared], config.sliding_window))
    x = x + project(np.concatenate(heads, axis=1), tensors, layer, "o_proj")
    h = np.stack([norm(row, tensors["mlp_norm", layer], config.norm_eps) for row in x])
    gate, up = project(h, tensors, layer, "gate_proj"), project(h, tensors, layer, "up_proj")
    return x + project(gate / (1 + np.exp(-gate)) * up, tensors, layer, "down_proj")


def layer_inputs(tokens, tensors, config):
    """What goes into each layer, and what comes out of the last: n_layers + 1 arrays (T, d_model)."""
    inputs = [tensors["embed", None][tokens]]
    for layer in range(config.n_layers):
        inputs.append(layer_output(inputs[-1], tensors, layer, config))
    return inputs


def logits(tokens, tensors, config):
    """Logits (T, vocab_size) of a sequence of ids (T,)."""
    x = np.stack([norm(row, tensors["final_norm", None], config.norm_eps) for row in layer_inputs(tokens, tensors, config)[-1]])
    return x @ tensors["embed" if config.tie_embeddings else "lm_head", None].T
