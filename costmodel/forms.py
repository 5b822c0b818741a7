"""The shapes that the closed forms of operations come in, under one load.

Each form is a method that gives the `Counts` of an operation in all layers
together, or None where the model has no such weight.
"""

from costmodel.experts import PROJECTIONS
from costmodel.loads import layers_by_window
from costmodel.storage import kv_token_bytes
from costmodel.tensors import tensors
from npinfer.ledger import Counts

# FLOPs of each element.  exp, + 1, divide, times up; tanh GELU: cube 2, times 0.044715, + x, times sqrt(2 / pi),
# tanh, + 1, times x, times 0.5, and times up where there is a gate; clamped: min 1, clip 2, times alpha, exp, + 1,
# divide, up + 1, times up.
ACT_FLOPS = {"swiglu": 4, "geglu": 10, "gelu": 9, "clamped_swiglu": 9}


class Forms:
    """Forms of one model and precision under one load."""

    def __init__(self, config, precision, load):
        self.config, self.precision, self.load = config, precision, load
        self.tensors = tensors(config)
        self.act = precision.activations.bits // 8

    def embed(self):
        config, load = self.config, self.load
        d = config.d_model
        (format_,) = self.tensors["embed"].formats(self.precision)
        times = config.scale_embeddings + config.learned_positions + (format_ in ("int8", "int4"))
        positions = 0
        if config.learned_positions:  # a row for each new position, whatever the batch
            positions = self._bytes("positions") // config.max_context * load.positions
        return Counts(
            elementwise_flops=times * load.tokens * d,
            weight_bytes_read=load.embedding_bytes + positions,
            activation_bytes_written=load.tokens * d * self.act,
        )

    def product(self, name, rows=None):
        """A product with a matrix in each of its layers, at so many positions; all tokens by default."""
        matrix = self.tensors.get(name)
        if matrix is None:
            return None
        rows = self.load.tokens if rows is None else rows
        (d_out, d_in), n_layers = matrix.shape, len(matrix.layers)
        biased = f"{name}.bias" in self.tensors
        flops = n_layers * biased * rows * d_out
        for format_, n in matrix.formats(self.precision).items():
            flops += n * self._widening(format_, rows, d_out, d_in)
        return Counts(
            matmul_flops=n_layers * 2 * rows * d_in * d_out,
            elementwise_flops=flops,
            weight_bytes_read=self.load.forwards * (self._bytes(name) + self._bytes(f"{name}.bias")),
            activation_bytes_read=n_layers * rows * d_in * self.act,
            activation_bytes_written=n_layers * rows * d_out * self.act,
        )

    def head(self):
        """The product with the head, which may be the embedding."""
        rows, config = self.load.head_rows, self.config
        capping = 3 * rows * config.vocab_size if config.final_softcap else 0  # divide, tanh, multiply
        return self.product("embed" if config.tie_embeddings else "lm_head", rows) + Counts(elementwise_flops=capping)

    def norm(self, name, rows=None):
        """A norm of so many rows in each of its layers; one for each token by default."""
        gain = self.tensors.get(name)
        if gain is None:
            return None
        (d,), n_layers = gain.shape, len(gain.layers)
        # A layer norm's mean (d - 1 and 1), its subtraction d and its bias d come on top.
        per_row = 7 * d + 2 if f"{name}.bias" in self.tensors else 4 * d + 2
        n = n_layers * (self.load.tokens if rows is None else rows)
        return Counts(
            elementwise_flops=n * per_row,
            weight_bytes_read=self.load.forwards * (self._bytes(name) + self._bytes(f"{name}.bias")),
            activation_bytes_read=n * d * self.act,
            activation_bytes_written=n * d * self.act,
        )

    def qk_norm(self, name, n_heads):
        """The norm of queries or keys: of each head, of a whole projection, or of a latent."""
        return self.norm(name, self.load.tokens * (n_heads if self.config.qk_norm == "head" else 1))

    def elementwise(self, flops, n_read, n_written, n_layers=None):
        """So many FLOPs, and activations read and written, at every token; of every layer by default."""
        return Counts(
            elementwise_flops=self.load.tokens * flops,
            activation_bytes_read=self.load.tokens * n_read * self.act,
            activation_bytes_written=self.load.tokens * n_written * self.act,
        ) * (self.config.n_layers if n_layers is None else n_layers)

    def rope(self):
        config = self.config
        if config.learned_positions:
            return None
        if config.latent:  # the rotated part alone, of each query head and of the one key
            rotated = moved = (config.n_heads + 1) * config.rope_dim
        else:
            n_heads = config.n_heads + config.n_kv_heads
            rotated, moved = n_heads * config.rope_dim, n_heads * config.head_dim
        return self.elementwise(3 * rotated, moved, moved)

    def kv_append(self):
        config, (parts, heads, width) = self.config, self.config.kv_shape
        written = config.n_layers * self.load.tokens * kv_token_bytes(config, self.precision)
        return self.elementwise(0, parts * heads * width, 0) + Counts(kv_bytes_written=written)

    def kv_expand(self):
        """Keys and values of every cached row, from its latent; the rotated part of the key is copied to every head."""
        matrix, config = self.tensors.get("kv_expand"), self.config
        if matrix is None:
            return None
        (d_out, d_in), (_, _, width) = matrix.shape, config.kv_shape
        expanded = config.n_heads * (config.head_dim + config.value_dim)
        total = Counts(weight_bytes_read=self.load.forwards * self._bytes("kv_expand"))
        for (_, layers), seen in zip(layers_by_window(config), self.load.attention):
            flops = len(layers) * seen.keys * width if self.precision.kv == "int8" else 0
            for format_, n in matrix.formats(self.precision, layers).items():
                flops += n * self._widening(format_, seen.keys, d_out, d_in)
            total += Counts(elementwise_flops=flops) + Counts(
                matmul_flops=2 * seen.keys * d_in * d_out,
                kv_bytes_read=seen.keys * kv_token_bytes(config, self.precision),
                activation_bytes_written=seen.keys * expanded * self.act,
            ) * len(layers)
        return total

    def attention(self):
        """attn_scores, softmax and attn_mix: with kv_expand the only operations in which a window shows."""
        config, n_heads, act = self.config, self.config.n_heads, self.act
        rows = self.load.tokens * n_heads
        scaled = self.precision.kv == "int8" and not config.latent  # scales of K multiply scores, those of V probabilities
        capping = 3 if config.attn_softcap else 0
        scores = softmax = mix = Counts()
        for (_, layers), seen in zip(layers_by_window(config), self.load.attention):
            n_scores = n_heads * seen.pairs
            in_softmax = n_scores + rows * config.attn_sinks
            scores += (
                self._attended(seen, config.head_dim)
                + Counts(
                    elementwise_flops=(1 + capping + scaled) * n_scores,
                    activation_bytes_read=rows * config.head_dim * act,
                    score_bytes_written=n_scores * act,
                )
            ) * len(layers)
            softmax += Counts(  # max, subtract, exp, sum, divide
                elementwise_flops=5 * in_softmax - 2 * rows,
                score_bytes_read=in_softmax * act,
                score_bytes_written=in_softmax * act,
            ) * len(layers)
            mix += (
                self._attended(seen, config.value_dim)
                + Counts(
                    elementwise_flops=scaled * n_scores,
                    activation_bytes_written=rows * config.value_dim * act,
                    score_bytes_read=n_scores * act,
                )
            ) * len(layers)
        return scores, softmax + Counts(weight_bytes_read=self.load.forwards * self._bytes("sinks")), mix

    def _attended(self, seen, dim):
        """One layer's product of scores with keys or values of so many elements, which are in the cache or were expanded."""
        config, n_heads = self.config, self.config.n_heads
        return Counts(
            matmul_flops=2 * n_heads * dim * seen.pairs,
            masked_flops=2 * n_heads * dim * seen.masked,
            kv_bytes_read=0 if config.latent else seen.keys * kv_token_bytes(config, self.precision) // 2,
            activation_bytes_read=seen.keys * n_heads * dim * self.act if config.latent else 0,
        )

    def router(self):
        """The router's product and what its gate makes of it."""
        product, experts = self.product("router"), self.config.experts
        if product is None:
            return None
        n, k = experts.n_experts, experts.n_active
        if experts.gate == "softmax":
            gate = 5 * n - 2 + (2 * k - 1 if experts.renormalise else 0)
        elif experts.gate == "topk_softmax":
            gate = 5 * k - 2
        else:  # exp, + 1, divide, + correction; the two best of a group added; sum, + 1e-20, divide; scale
            groups = experts.n_groups if experts.n_groups > 1 else 0
            gate = 4 * n + groups + (2 * k if experts.renormalise else 0) + k
        n_layers = len(self.tensors["router"].layers)
        return product + Counts(
            elementwise_flops=n_layers * self.load.tokens * gate,
            weight_bytes_read=self.load.forwards * self._bytes("router_correction"),
        )

    def mlp_product(self, name):
        """A projection of the MLP: of dense layers, of the experts that are chosen, and of those that all tokens share."""
        parts = [self.product(name), self._routed(name), self.product(f"shared_{name}")]
        parts = [part for part in parts if part is not None]
        return sum(parts, Counts()) if parts else None

    def _routed(self, name):
        """A projection of the k experts of each token; the last one weights and sums what they give."""
        if f"expert.{name}" not in self.tensors:
            return None
        matrix, (config, load) = self.tensors[f"expert.{name}"], (self.config, self.load)
        (d_out, d_in), k = matrix.shape, config.experts.n_active
        touched = load.experts[PROJECTIONS.index(name)]
        per_token = k * d_out * config.mlp_bias
        if name == "down_proj":
            per_token += (2 * k - 1) * d_out
            n_read, n_written = k * d_in + k, d_out  # the k weights too
        else:
            n_read, n_written = d_in, k * d_out
        n_scaled = matrix.formats(self.precision).get("int8", 0)  # layers in which a scale multiplies each output
        return self.elementwise(per_token, n_read, n_written, len(matrix.layers)) + Counts(
            matmul_flops=2 * len(matrix.layers) * load.tokens * k * d_in * d_out,
            elementwise_flops=n_scaled * load.tokens * k * d_out + touched.widened,
            weight_bytes_read=touched.nbytes,
        )

    def mlp_act(self):
        config, experts = self.config, self.config.experts
        n_sparse = sum([kind.sparse for kind in config.kinds])
        n = (config.n_layers - n_sparse) * config.d_ff  # elements of one token in all layers
        if n_sparse:
            n += n_sparse * (experts.n_active + experts.n_shared) * experts.d_ff
        return self.elementwise(ACT_FLOPS[config.mlp_act] * n, (2 if config.gated else 1) * n, n, n_layers=1)

    def mlp_residual(self):
        """What comes in and what the MLP adds; what shared experts add comes after it."""
        shared = self.tensors.get("shared_down_proj")
        d, n_shared = self.config.d_model, len(shared.layers) if shared else 0
        return self.elementwise(d, 2 * d, d, self.config.n_layers + n_shared)

    def _widening(self, format_, rows, d_out, d_in):
        """Multiplications by scales: an int8 one for each output, an int4 one for each weight."""
        return {"int8": rows * d_out, "int4": self.load.forwards * d_in * d_out}.get(format_, 0)

    def _bytes(self, name):
        """Stored bytes of a weight in all its layers, 0 if there is none."""
        return self.tensors[name].total_bytes(self.precision) if name in self.tensors else 0
