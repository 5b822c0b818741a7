"""The textbook chapter's claims, each computed: what it says, what its formula gives, what the exact count gives.

`chapter(setting)` returns the rows of all sections in the chapter's order.
The claims stand in three files: `textbook_costs` (sections 0 to 5, 9 and 10),
`textbook_line` (6 to 8, 14 and 15) and `textbook_caches` (11 to 13).

What a row quotes is the chapter's own example: the Mistral-7B shape in fp16,
1000 prompt and 100 output tokens, 1008 GB/s.  All other rows are of the
setting's model and GPU; their exact times are the floors of `costmodel.predict`.
"""

from costmodel import textbook_caches, textbook_costs, textbook_line
from costmodel.textbook_rows import Setting
from npinfer.errors import UnknownName

SECTIONS = {
    "0": ("Two phases", textbook_costs.two_phases),
    "1": ("Autoregression", textbook_costs.autoregression),
    "2.1": ("A linear layer", textbook_costs.linear_layer),
    "2.2": ("With and without a KV cache", textbook_costs.kv_cache),
    "3": ("Compute-bound, bandwidth-bound", textbook_costs.bounds),
    "4.1": ("Weight bytes", textbook_costs.weight_bytes),
    "4.2": ("KV bytes", textbook_costs.kv_bytes),
    "5": ("The floor of TPOT", textbook_costs.tpot_floor),
    "6": ("Latency = b + k*x", textbook_line.line),
    "7": ("Chain of thought", textbook_line.chain_of_thought),
    "8": ("Tokens per second", textbook_line.throughput),
    "9": ("FLOPs", textbook_costs.flops),
    "10": ("Lower bounds of time", textbook_costs.lower_bounds),
    "11": ("System and user prompt", textbook_caches.system_prompt),
    "12.1": ("Prefix sharing", textbook_caches.prefix_sharing),
    "12.2": ("Prompt cache", textbook_caches.prompt_cache),
    "13": ("Session cache", textbook_caches.session_cache),
    "14": ("Which phase dominates", textbook_line.dominance),
    "15": ("Summary", textbook_line.summary),
}


def sections(name=None):
    """Numbers of the sections: all, the one of this name, or those below it ("12": 12.1 and 12.2).

    Raises
    ------
    UnknownName
        If there is none; the message lists them.
    """
    found = [number for number in SECTIONS if name is None or f"{number}.".startswith(f"{name}.")]
    if not found:
        raise UnknownName("section", name, SECTIONS)
    return found


def chapter(setting=None, section=None):
    """Rows of the chapter in its order; `textbook_rows.Row` says what a row is.

    Parameters
    ----------
    setting : Setting, optional
        Model, GPU and efficiency of the rows that do not quote the chapter.
    section : str, optional
        Only this one, such as "12.1" or "12".
    """
    setting = setting or Setting.of()
    return [row._replace(section=number) for number in sections(section) for row in SECTIONS[number][1](setting)]
