"""Which tensors a model has, by our names, and their shapes."""


def layer_tensors(config, kind):
    """Shape of every tensor of one layer of a `LayerKind`, by name.

    A matrix is (d_out, d_in); tensors of experts have one more axis before
    that, for the experts.
    """
    d, norms = config.d_model, {}
    if config.pre_norm:
        norms |= {"attn_norm": (d,), "mlp_norm": (d,)}
    if config.post_norm:
        norms |= {"post_attn_norm": (d,), "post_mlp_norm": (d,)}
    if config.norm == "layer":
        norms |= {name + ".bias": shape for name, shape in norms.items()}
    attention = _latent_tensors(config) if config.latent else _attention_tensors(config)
    mlp = _expert_tensors(config) if kind.sparse else _mlp_tensors(config, config.d_ff)
    return norms | attention | mlp


def _attention_tensors(config):
    d, d_q, d_kv = config.d_model, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes = {"q_proj": (d_q, d), "k_proj": (d_kv, d), "v_proj": (d_kv, d)}
    if config.qkv_bias:
        shapes |= {name + ".bias": shape[:1] for name, shape in shapes.items()}
    if config.qk_norm:
        q_width, k_width = norm_widths(config)
        shapes |= {"q_norm": (q_width,), "k_norm": (k_width,)}
    if config.attn_sinks:
        shapes["sinks"] = (config.n_heads,)
    shapes["o_proj"] = (d, d_q)
    if config.o_bias:
        shapes["o_proj.bias"] = (d,)
    return shapes


def norm_widths(config):
    """Elements that q_norm and k_norm see together: a head, or all heads of a projection."""
    heads = (config.n_heads, config.n_kv_heads) if config.qk_norm == "full" else (1, 1)
    return tuple([n * config.head_dim for n in heads])


def _latent_tensors(config):
    d, latent, d_q = config.d_model, config.latent, config.n_heads * config.head_dim
    shapes = {"q_proj": (d_q, d)}
    if latent.q_rank is not None:
        shapes = {"q_down": (latent.q_rank, d), "q_norm": (latent.q_rank,), "q_up": (d_q, latent.q_rank)}
    expanded = config.n_heads * (config.head_dim - latent.rope_dim + latent.value_dim)
    shapes |= {
        "kv_down": (latent.kv_rank + latent.rope_dim, d),
        "k_norm": (latent.kv_rank,),
        "kv_expand": (expanded, latent.kv_rank),
        "o_proj": (d, config.n_heads * latent.value_dim),
    }
    return shapes | ({"o_proj.bias": (d,)} if config.o_bias else {})


def _mlp_tensors(config, d_ff):
    d = config.d_model
    shapes = {"gate_proj": (d_ff, d)} if config.gated else {}
    shapes |= {"up_proj": (d_ff, d), "down_proj": (d, d_ff)}
    if config.mlp_bias:
        shapes |= {name + ".bias": shape[:1] for name, shape in shapes.items()}
    return shapes


def _expert_tensors(config):
    experts, d = config.experts, config.d_model
    shapes = {"router": (experts.n_experts, d)}
    if experts.router_bias:
        shapes["router.bias"] = (experts.n_experts,)
    if experts.gate == "sigmoid":
        shapes["router_correction"] = (experts.n_experts,)
    shapes |= {name: (experts.n_experts, *shape) for name, shape in _mlp_tensors(config, experts.d_ff).items()}
    if experts.n_shared:
        shared = _mlp_tensors(config, experts.n_shared * experts.d_ff)
        shapes |= {"shared_" + name: shape for name, shape in shared.items() if not name.endswith(".bias")}
    return shapes


def model_tensors(config):
    """Shape of every tensor outside the layers, by name."""
    d = config.d_model
    shapes = {"embed": (config.vocab_size, d)}
    if config.learned_positions:
        shapes["positions"] = (config.max_context, d)
    shapes["final_norm"] = (d,)
    if config.norm == "layer":
        shapes["final_norm.bias"] = (d,)
    if not config.tie_embeddings:
        shapes["lm_head"] = (config.vocab_size, d)
    return shapes
