"""What a model weighs: its parameters, and the bytes of its weights and of its KV cache."""

from math import prod

from costmodel.arguments import least, refuse_overflow, whole_numbers
from costmodel.loads import layers_by_window
from costmodel.storage import kv_token_bytes
from costmodel.tensors import tensors


def n_parameters(config):
    """Parameters of the model, a tied head once, all experts.

    The correction of a sigmoid gate is none: it is stored, and set in training
    by a rule and not by a gradient (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2).

    >>> n_parameters(npinfer.preset("mistral-7b"))
    7241732096
    """
    return sum([tensor.n_parameters for name, tensor in tensors(config).items() if name != "router_correction"])


def n_active_parameters(config):
    """Parameters of the model with the k experts of one token in place of all, embedding and head included."""
    idle = [_idle_copies(config, each) * (each.n_parameters // each.n_copies) for each in tensors(config).values()]
    return n_parameters(config) - sum(idle)


def n_streamed_parameters(config):
    """Parameters that decode steps read: all, less the tables of which a step reads the rows of its tokens.

    Those are the input embedding, where the head has its own matrix, and learned positions.  All experts are in it.

    >>> n_streamed_parameters(npinfer.preset("mistral-7b"))      # the 7.111e9 of the textbook's example
    7110660096
    """
    return n_parameters(config) - sum([table.n_parameters for table in _looked_up(config)])


def n_token_parameters(config):
    """Parameters that a decode step of one sequence reads: `n_streamed_parameters`, of a layer's E experts k.

    P of the textbook's 2*B*L*P: each of them takes part in one product a token.

    >>> n_token_parameters(npinfer.preset("mixtral-8x7b-v0.1"))      # 2 of 8 experts, without the input embedding
    12748591104
    """
    return n_streamed_parameters(config) - (n_parameters(config) - n_active_parameters(config))


def weight_bytes(config, precision, streamed=False):
    """Stored bytes of the weights.

    Parameters
    ----------
    streamed : bool
        Those that a decode step of one sequence reads, the rows of its token in
        the embedding and in a table of positions left out: of a layer's E
        experts k.  Otherwise those that occupy memory.
    """
    every, tables = tensors(config).values(), _looked_up(config)
    if not streamed:
        return sum([each.n_copies * each.total_bytes(precision) for each in every])
    used = [(each.n_copies - _idle_copies(config, each), each) for each in every if each not in tables]
    return sum([n_copies * each.total_bytes(precision) for n_copies, each in used])


def _looked_up(config):
    """Tables of which a forward reads rows, not everything."""
    names = ["positions"] if config.tie_embeddings else ["embed", "positions"]
    return [tensors(config)[name] for name in names if name in tensors(config)]


def _idle_copies(config, tensor):
    """Copies of a tensor, one for each expert, that a token does not use."""
    return tensor.n_copies - config.experts.n_active if tensor.n_copies > 1 else 0


def kv_elements_per_token(config):
    """Elements that one token adds to the KV cache: a key and a value in every layer, or one latent row.

    n_kv_heads, not n_heads: grouped queries share their keys and values.
    Source: Ainslie et al. 2023, "GQA", arXiv:2305.13245, section 2.2; latent:
    DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, section 2.1.

    >>> kv_elements_per_token(npinfer.preset("mistral-7b"))      # 32 * (8 * 128 + 8 * 128)
    65536
    """
    return config.n_layers * prod(config.kv_shape)


def kv_bytes_per_token(config, precision):
    """Bytes that one token adds to the KV cache, an int8 cache's scales included.

    >>> kv_bytes_per_token(npinfer.preset("llama-2-7b"), npinfer.Precision())      # 2 * 32 layers * 32 heads * 128 * 2 B
    524288
    """
    return config.n_layers * kv_token_bytes(config, precision)


@refuse_overflow
def kv_bytes_read(config, precision, n_context, batch=1):
    """KV bytes that a decode step reads when its token sees `n_context` positions, itself included.

    A layer with a window reads at most the window.
    """
    n_context = whole_numbers("n_context", n_context, 0)
    return _kv_bytes(config, precision, batch, n_context, lambda window: window)


@refuse_overflow
def kv_bytes_held(config, precision, n_context, batch=1):
    """KV bytes in memory after `n_context` positions: a layer with a window keeps the window - 1 last."""
    n_context = whole_numbers("n_context", n_context, 0)
    return _kv_bytes(config, precision, batch, n_context, lambda window: window - 1)


def _kv_bytes(config, precision, batch, n_context, limit):
    batch = whole_numbers("batch", batch, 1)
    rows = sum(
        len(layers) * (n_context if window is None else least(n_context, limit(window)))
        for window, layers in layers_by_window(config)
    )
    return batch * rows * kv_token_bytes(config, precision)
