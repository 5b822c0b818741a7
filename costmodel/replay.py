"""Replay a real request trace through the store of the prompt cache: what would it have saved?

The published Mooncake format: one JSON object a line, with a timestamp in ms,
input_length and output_length in tokens, and hash_ids, one for each block of
512 prompt tokens, the last block partly filled; equal ids are the same block
behind the same history.  Source: Qin et al. 2024, "Mooncake", arXiv:2407.00079,
and its trace release (FAST'25).

Blocks go through `npinfer.blocks.BlockStore` as in `PromptCache`: the same
keys, order of eviction and budget, without arrays.  Counts and times come from
the closed forms, of which a sample is held to shape-only runs.
"""

import json
from typing import NamedTuple

import numpy as np

from costmodel import caching, formulas
from npinfer.blocks import Block, BlockStore, root_key
from npinfer.errors import InputError
from npinfer.generate import no_tokens
from npinfer.ledger import Ledger
from npinfer.model import Transformer

BLOCK_TOKENS = 512
PERCENTILES = (50, 90, 99)
FIELDS = {"timestamp": 0, "input_length": 1, "output_length": 0}  # and the least each may be


class Request(NamedTuple):
    """One line of a trace."""

    input_length: int
    hash_ids: list


class Hits(NamedTuple):
    """What a store of one capacity did with a trace.

    Attributes
    ----------
    matched_tokens : int array
        Prompt tokens of each request that were held, a partly filled block by its real length.
    hit_blocks, evicted_blocks, peak_bytes : int
    """

    matched_tokens: np.ndarray
    hit_blocks: int
    evicted_blocks: int
    peak_bytes: int


def parse_request(line):
    """The `Request` of one line, or an `InputError` that says what is wrong with it."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError("is not a JSON object")
    for name, least in FIELDS.items():
        value = fields.get(name)
        if type(value) is not int or value < least:
            raise InputError(f"{name} is {value!r}, expected a whole number from {least} up")
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block) is int and 0 <= block < 2**63 for block in ids):
        raise InputError("hash_ids is not a list of whole numbers")
    n_blocks = -(-fields["input_length"] // BLOCK_TOKENS)
    if len(ids) != n_blocks:
        raise InputError(
            f"{len(ids)} hash_ids, expected {n_blocks} blocks of {BLOCK_TOKENS} tokens for input_length {fields['input_length']}"
        )
    return Request(fields["input_length"], ids)


def read_trace(lines, skip_bad=False):
    """Requests of a trace, and how many lines were skipped; blank lines are no requests.

    Raises
    ------
    InputError
        Naming the line, if one is malformed and `skip_bad` is not set, or if there is no request at all.
    """
    requests, n_skipped = [], 0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(parse_request(line))
        except InputError as error:
            if not skip_bad:
                raise InputError(f"line {number}: {error}; correct it, or go on without such lines (--skip-bad-lines)") from None
            n_skipped += 1
    if not requests:
        raise InputError("the trace has no request that can be read")
    return requests, n_skipped


def run_store(requests, capacity_bytes, block_bytes, progress=None):
    """Look up and keep every request's blocks in turn, under a budget; `Hits`.

    A request is looked up before its blocks are inserted, and its chain is
    given back tail first.  One that does not fit the budget is not kept.
    """
    ticks = iter(range(len(requests) + 1))
    store = BlockStore(capacity_bytes, None, lambda: next(ticks))
    root = Block(root_key(b"trace", b""))
    matched = np.empty(len(requests), np.int64)
    hit_blocks = peak_bytes = 0
    for number, request in enumerate(requests):
        ids = [block.to_bytes(8, "little") for block in request.hash_ids]
        chain = []
        while len(chain) < len(ids) and (block := store.child(chain[-1] if chain else root, ids[len(chain)])):
            chain.append(block)
        hit_blocks += len(chain)
        matched[number] = min(len(chain) * BLOCK_TOKENS, request.input_length)
        store.acquire(chain)
        new = ids[len(chain) :]
        if store.make_room(len(new) * block_bytes) is not None:
            for block_ids in new:
                chain.append(store.insert(chain[-1] if chain else root, block_ids, None, block_bytes))
        peak_bytes = max(peak_bytes, store.used)
        store.release(chain, store.clock())
        if progress is not None:
            progress()
    return Hits(matched, hit_blocks, store.evicted, peak_bytes)


def replay(requests, config, precision, gpu, capacities_bytes, progress=None):
    """What a prompt cache of each capacity saves on a trace.

    Parameters
    ----------
    requests : list of Request
    capacities_bytes : list of int or None
        None is no bound.
    progress : callable, optional
        Called for each request of each capacity.

    Returns
    -------
    dict
        requests, closed_form, results (one for each capacity); keys as in the README, "Replay".
    """
    block_bytes = BLOCK_TOKENS * formulas.kv_bytes_per_token(config, precision)
    n_prompt = np.array([request.input_length for request in requests], np.int64)
    n_blocks = sum(len(request.hash_ids) for request in requests)
    cold = formulas.forward_counts(config, precision, 1, 0 * n_prompt, n_prompt).matmul_flops
    cold_s = _percentiles(caching.prefill_times_s(config, precision, gpu, n_prompt, 0 * n_prompt))
    flops_cold = sum(cold.tolist())  # Python ints: the sum of a long trace has no room in int64
    results, checks = [], []
    for capacity in capacities_bytes:
        hits = run_store(requests, capacity, block_bytes, progress)
        n_cached = np.minimum(hits.matched_tokens, n_prompt - 1)  # the last token is computed for its logits
        warm = formulas.forward_counts(config, precision, 1, n_cached, n_prompt - n_cached).matmul_flops
        warm_s = _percentiles(caching.prefill_times_s(config, precision, gpu, n_prompt, n_cached))
        checks.append(check_sample(config, precision, n_prompt, n_cached))
        results.append(
            {
                "capacity_blocks": None if capacity is None else capacity // block_bytes,
                "capacity_bytes": capacity,
                "block_hit_rate": hits.hit_blocks / n_blocks,
                "token_hit_rate": int(hits.matched_tokens.sum()) / int(n_prompt.sum()),
                "evicted_blocks": hits.evicted_blocks,
                "peak_bytes": hits.peak_bytes,
                "flops_saved": flops_cold - sum(warm.tolist()),
                "flops_saved_share": 1 - sum(warm.tolist()) / flops_cold,
                "ttft_s": {
                    level: None if cold_s[level] is None else {"cold": cold_s[level], "warm": warm_s[level]}
                    for level in caching.LEVELS
                },
            }
        )
    return {"requests": len(requests), "blocks": n_blocks, "closed_form": {"agrees": all(checks)}, "results": results}


def check_sample(config, precision, n_prompt, n_cached, n_sampled=8):
    """Whether shape-only runs of some requests, evenly spread, count what the closed form says."""
    model = Transformer.shape_only(config, precision)
    for at in np.linspace(0, len(n_prompt) - 1, n_sampled).astype(int):
        n, cached = int(n_prompt[at]), int(n_cached[at])
        cache = model.new_cache()
        if cached:
            model.prefill(no_tokens((1, cached)), cache)
        with Ledger() as ledger:
            model.prefill(no_tokens((1, n - cached)), cache)
        if ledger.total() != formulas.forward_counts(config, precision, 1, cached, n - cached):
            return False
    return True


def _percentiles(times_s):
    """Percentiles of the times of each level, None where there are none."""
    levels = {level: times_s.get(level) for level in caching.LEVELS}
    return {
        level: None if times is None else {f"p{p}": float(np.percentile(times, p)) for p in PERCENTILES}
        for level, times in levels.items()
    }
