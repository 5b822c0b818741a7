"""The decoder of all families written a second time: float64, no cache, no ledger, one sequence, one head at a time.

An answer that is independent of the package: it shares tensors with it (a
dict by name, layer and, for those of experts, expert) and nothing else.
`logits` is the model; the functions above it are its parts and the storage
formats, each from its definition.
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
    """Tensors as a format holds them, float64; beside int8 and int4 all that is no matrix, and positions, stays at 16 bits."""
    quantised = {"int8": int8, "int4": int4}

    def hold(name, array):
        if weights in quantised:
            return quantised[weights](array) if array.ndim == 2 and name != "positions" else ROUND["fp16"](array)
        return ROUND[weights](array)

    return {key: hold(key[0], array) for key, array in tensors.items()}


# ---- positions


def window_of(layer, config):
    pattern = config.window_pattern
    return config.sliding_window if pattern[layer % len(pattern)] else None


def llama3(turn, pair, theta, dim, scaling, length):
    """As its release words it, by wavelength."""
    wavelength = 2 * math.pi / turn
    if wavelength < scaling.original_max_context / scaling.high_freq_factor:
        return turn
    if wavelength > scaling.original_max_context / scaling.low_freq_factor:
        return turn / scaling.factor
    smooth = (scaling.original_max_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * turn / scaling.factor + smooth * turn


def linear(turn, pair, theta, dim, scaling, length):
    """Chen et al. 2023, arXiv:2306.15595: position m becomes m / factor."""
    return turn / scaling.factor


def dynamic(turn, pair, theta, dim, scaling, length):
    """A base for the length of the text, so that the slowest pair is stretched as much as the text is too long."""
    if length <= scaling.original_max_context or pair == 0:  # the fastest pair turns by 1 whatever the base
        return turn
    stretch = scaling.factor * length / scaling.original_max_context - scaling.factor + 1
    return (theta * stretch ** (dim / (dim - 2))) ** (-2 * pair / dim)


def yarn(turn, pair, theta, dim, scaling, length):
    """Peng et al. 2023, arXiv:2309.00071, section 3.2, with a ramp over pairs: from where a pair turns beta_fast times
    in the original context (and before that is kept) to where it turns beta_slow times (and is divided by the factor)."""
    first, last = [
        dim / 2 * math.log(scaling.original_max_context / (2 * math.pi * n_turns), theta)
        for n_turns in (scaling.beta_fast, scaling.beta_slow)
    ]
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    divided = min(max((pair - first) / ((last - first) or 0.001), 0), 1)
    return (1 - divided) * turn + divided * turn / scaling.factor


STRETCHED = {"RopeScaling": llama3, "LinearScaling": linear, "DynamicScaling": dynamic, "YarnScaling": yarn}


def turned(rows, positions, lengths, layer, config, first=0):
    """Rows (T, width) of a head: elements i and i + half behind `first` are a point of the plane, turned about the origin.

    `lengths` says, for each position, how long the text was when it was computed.
    """
    dim, theta, scaling = config.rope_dim, config.rope_theta, config.rope_scaling
    if config.local_rope_theta is not None and window_of(layer, config) is not None:
        theta, scaling = config.local_rope_theta, None
    out, half = rows.copy(), dim // 2
    for row, position, length in zip(out, positions, lengths):
        for pair in range(half):
            turn, size = theta ** (-2 * pair / dim), 1.0
            if scaling is not None:
                turn = STRETCHED[type(scaling).__name__](turn, pair, theta, dim, scaling, length)
                size = scaling.attention_factor
            point = complex(row[first + pair], row[first + pair + half]) * np.exp(1j * position * turn) * size
            row[first + pair], row[first + pair + half] = point.real, point.imag
    return out


# ---- norms, projections, activations


def rms_norm(row, gain, eps):
    return row / math.sqrt(sum(value * value for value in row) / len(row) + eps) * gain


def layer_norm(row, gain, bias, eps):
    off = row - sum(row) / len(row)
    return off / math.sqrt(sum(value * value for value in off) / len(row) + eps) * gain + bias


def normed(x, tensors, layer, name, config):
    """Rows x (T, d) after a norm, or as they are if the model does not have it."""
    if (name, layer) not in tensors:
        return x
    gain = tensors[name, layer]
    if config.norm == "layer":
        return np.stack([layer_norm(row, gain, tensors[name + ".bias", layer], config.norm_eps) for row in x])
    return np.stack([rms_norm(row, gain, config.norm_eps) for row in x])


def by_parts(x, tensors, layer, name, width, eps):
    """Rows (T, d) with an RMS norm of each `width` elements, if there is one of this name."""
    if (name, layer) not in tensors:
        return x
    parts = [[rms_norm(part, tensors[name, layer], eps) for part in row.reshape(-1, width)] for row in x]
    return np.array(parts).reshape(x.shape)


def project(x, tensors, layer, name, *expert):
    return x @ tensors[name, layer, *expert].T + tensors.get((name + ".bias", layer, *expert), 0)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def clamped_swiglu(gate, up, limit, alpha):
    gate, up = min(gate, limit), max(-limit, min(up, limit))
    return gate * sigmoid(alpha * gate) * (up + 1)


ACTS = {
    "swiglu": lambda gate, up: gate * sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "gelu": gelu,
    "clamped_swiglu": clamped_swiglu,
}


# ---- attention


def attend(queries, keys, values, window, scale, softcap=None, sink=None):
    """One head: every query over the keys up to its own, the `window` last of them; a sink takes a share and gives nothing."""
    out = np.empty((len(queries), values.shape[1]))
    for i, query in enumerate(queries):
        first = 0 if window is None else max(0, i - window + 1)
        scores = keys[first : i + 1] @ query * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores)
        out[i] = weights / (weights.sum() + (0 if sink is None else math.exp(sink))) @ values[first : i + 1]
    return out


def split(x, width):
    """(T, n_heads * width) -> (n_heads, T, width)"""
    return x.reshape(len(x), -1, width).swapaxes(0, 1)


def cached(h, lengths, tensors, layer, config):
    """What a cache holds of inputs h (T, d_model): [K after rotation, V], each (n_kv_heads, T, head_dim), or [latent rows]."""
    positions = range(len(h))
    if config.latent is None:
        k = project(h, tensors, layer, "k_proj")
        k = by_parts(k, tensors, layer, "k_norm", k.shape[1] if config.qk_norm == "full" else config.head_dim, config.norm_eps)
        k = [turned(head, positions, lengths, layer, config) for head in split(k, config.head_dim)]
        return [np.stack(k), split(project(h, tensors, layer, "v_proj"), config.head_dim)]
    rank = config.latent.kv_rank
    row = project(h, tensors, layer, "kv_down")
    latent = by_parts(row[:, :rank], tensors, layer, "k_norm", rank, 1e-6)
    return [np.concatenate([latent, turned(row[:, rank:], positions, lengths, layer, config)], axis=1)[None]]


def keys_and_values(rows, tensors, layer, config):
    """A key and a value (T, width) for each query head, from what a cache holds."""
    if config.latent is None:
        group = config.n_heads // config.n_kv_heads
        return [(rows[0][head // group], rows[1][head // group]) for head in range(config.n_heads)]
    (row,), rank, nope = rows[0], config.latent.kv_rank, config.head_dim - config.latent.rope_dim
    heads = split(project(row[:, :rank], tensors, layer, "kv_expand"), nope + config.latent.value_dim)
    return [(np.concatenate([head[:, :nope], row[:, rank:]], axis=1), head[:, nope:]) for head in heads]


def queries(h, lengths, tensors, layer, config):
    """(n_heads, T, head_dim), after rotation."""
    first = 0
    if config.latent is None:
        q = project(h, tensors, layer, "q_proj")
        q = by_parts(q, tensors, layer, "q_norm", q.shape[1] if config.qk_norm == "full" else config.head_dim, config.norm_eps)
    else:
        first = config.head_dim - config.latent.rope_dim
        if config.latent.q_rank is None:
            q = project(h, tensors, layer, "q_proj")
        else:
            q = by_parts(project(h, tensors, layer, "q_down"), tensors, layer, "q_norm", config.latent.q_rank, 1e-6)
            q = project(q, tensors, layer, "q_up")
    return [turned(head, range(len(h)), lengths, layer, config, first) for head in split(q, config.head_dim)]


def attention(h, lengths, tensors, layer, config):
    rows = cached(h, lengths, tensors, layer, config)
    scale = 1 / math.sqrt(config.head_dim) if config.attn_scale is None else config.attn_scale
    sinks = tensors.get(("sinks", layer), [None] * config.n_heads)
    heads = [
        attend(q, k, v, window_of(layer, config), scale, config.attn_softcap, sink)
        for q, (k, v), sink in zip(
            queries(h, lengths, tensors, layer, config), keys_and_values(rows, tensors, layer, config), sinks, strict=True
        )
    ]
    return project(np.concatenate(heads, axis=1), tensors, layer, "o_proj")


# ---- MLP and experts


def mlp(h, tensors, layer, config, prefix="", *expert):
    settings = (config.act_limit, config.act_alpha) if config.mlp_act == "clamped_swiglu" else ()
    names = ["up_proj"] if config.mlp_act == "gelu" else ["gate_proj", "up_proj"]
    act = np.vectorize(ACTS[config.mlp_act], otypes=[float])
    hidden = act(*[project(h, tensors, layer, prefix + name, *expert) for name in names], *settings)
    return project(hidden, tensors, layer, prefix + "down_proj", *expert)


def largest(scores, k):
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


def shares(scores):
    """The softmax of a list."""
    powers = [math.exp(score) for score in scores]
    return [power / math.fsum(powers) for power in powers]


def choice_of(scores, correction, settings):
    """Weights and numbers of one token's experts, as the families' papers word it."""
    k = settings.n_active
    if settings.gate == "topk_softmax":
        ids = largest(scores, k)
        return shares([scores[i] for i in ids]), ids
    if settings.gate == "softmax":
        scores = shares(scores)
        ids = largest(scores, k)
        weights = [scores[i] for i in ids]
        return ([weight / math.fsum(weights) for weight in weights] if settings.renormalise else weights), ids
    scores = [sigmoid(score) for score in scores]
    corrected, size = [score + extra for score, extra in zip(scores, correction)], settings.n_experts // settings.n_groups
    groups = [corrected[at : at + size] for at in range(0, settings.n_experts, size)]
    if settings.n_groups > 1:
        best = largest([sum(sorted(group)[-2:]) for group in groups], settings.n_groups_active)
        groups = [group if number in best else [-math.inf] * size for number, group in enumerate(groups)]
    ids = largest([score for group in groups for score in group], k)
    total = math.fsum([scores[i] for i in ids]) if settings.renormalise else 1
    return [settings.scale * scores[i] / total for i in ids], ids


def choices(h, tensors, layer, config):
    """`choice_of` for each row."""
    correction = tensors.get(("router_correction", layer))
    return [choice_of(list(scores), correction, config.experts) for scores in project(h, tensors, layer, "router")]


def experts(h, tensors, layer, config):
    out = []
    for row, (weights, ids) in zip(h, choices(h, tensors, layer, config)):
        parts = [weight * mlp(row[None], tensors, layer, config, "", i)[0] for weight, i in zip(weights, ids)]
        out.append(sum(parts) + (mlp(row[None], tensors, layer, config, "shared_")[0] if config.experts.n_shared else 0))
    return np.stack(out)


# ---- the model


def layer_output(x, lengths, tensors, layer, config):
    h = normed(x, tensors, layer, "attn_norm", config)
    x = x + normed(attention(h, lengths, tensors, layer, config), tensors, layer, "post_attn_norm", config)
    h = normed(x, tensors, layer, "mlp_norm", config)
    part = experts if ("router", layer) in tensors else mlp
    return x + normed(part(h, tensors, layer, config), tensors, layer, "post_mlp_norm", config)


def first_rows(tokens, tensors, config):
    """What goes into the first layer (T, d_model)."""
    x = tensors["embed", None][tokens] * (math.sqrt(config.d_model) if config.scale_embeddings else 1)
    return x + (tensors["positions", None][: len(tokens)] if config.learned_positions else 0)


def rows_of_first_layer(tokens, tensors, config):
    """What a cache holds of these ids in the first layer, `cached`."""
    h = normed(first_rows(tokens, tensors, config), tensors, 0, "attn_norm", config)
    return cached(h, [len(tokens)] * len(tokens), tensors, 0, config)


def layer_inputs(tokens, tensors, config, lengths=None):
    """What goes into each layer, and what comes out of the last: n_layers + 1 arrays (T, d_model)."""
    lengths = [len(tokens)] * len(tokens) if lengths is None else lengths
    inputs = [first_rows(tokens, tensors, config)]
    for layer in range(config.n_layers):
        inputs.append(layer_output(inputs[-1], lengths, tensors, layer, config))
    return inputs


def logits(tokens, tensors, config, chunks=None):
    """Logits (T, vocab_size) of a sequence of ids (T,), worked in forwards of these sizes."""
    lengths = np.repeat(np.cumsum(chunks), chunks) if chunks else None
    x = normed(layer_inputs(tokens, tensors, config, lengths)[-1], tensors, None, "final_norm", config)
    out = x @ tensors["embed" if config.tie_embeddings else "lm_head", None].T
    return out if config.final_softcap is None else config.final_softcap * np.tanh(out / config.final_softcap)
