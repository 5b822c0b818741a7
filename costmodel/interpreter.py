"""The interpreter of this project as an engine: how long `npinfer` itself takes, on a host that was measured.

It does one thing after the other, so its time is a sum, of what each kind of
work has at a rate of its own:

    weights      one row of activations streams them at the memory's bandwidth, and
                 each product takes `product_s` to start and to end; several rows
                 have them laid out anew first, at `packing_bytes_per_s`
    products     of several rows; one row's hide behind the streaming
    keys, values at `kv_bytes_per_s`, which many small products read them at
    elementwise  at the vector rate; of scores only those that are not skipped
    operations   `operation_s` each, for Python and NumPy around them

The rates are those of `costmodel.host`, under `interpreter` in the profile.
"""

SCORE_FLOPS = 6  # of one score, elementwise: its scale, and the softmax


def seconds(gpu, peak, work):
    """Seconds of a phase, and what most of them go to.

    Parameters
    ----------
    gpu : GPU
        With rates of its interpreter.
    peak : float
        matmul FLOPs per second.
    work : costmodel.expected.Work
    """
    own, model, n_forwards = gpu.interpreter, work.model, work.n_forwards
    weight_bytes = n_forwards * (model.dense_bytes + work.expert_bytes)
    streaming_s = max(0, work.streamed_bytes - weight_bytes) / own["kv_bytes_per_s"]
    computing_s = (work.elementwise_flops - SCORE_FLOPS * skipped_scores(work)) / gpu.vector_flops_per_s
    if work.n_tokens == 1:
        streaming_s += weight_bytes / gpu.memory_bytes_per_s + n_forwards * model.n_products * own["product_s"]
    else:
        streaming_s += weight_bytes / own["packing_bytes_per_s"]
        computing_s += work.needed_flops / peak
    shares = {
        "bandwidth": streaming_s,
        "compute": computing_s,
        "launches": n_forwards * model.n_operations * own["operation_s"],
    }
    return sum(shares.values()), max(shares, key=shares.get)


def skipped_scores(work):
    """Scores of a prefill that are counted and masked.

    Taken as not computed, as they are behind the last query of a block; the few within its block are computed
    (`npinfer.attention.BLOCK_ROWS` queries), and the measured vector rate answers for them.
    """
    if work.decode:
        return 0
    keys = 0  # that one query has beside it, in all heads
    for window, n_heads in work.model.heads:
        keys += n_heads * ((work.n_cached if window is None else min(work.n_cached, window - 1)) + work.n_new)
    return work.n_tokens * keys - work.pairs
