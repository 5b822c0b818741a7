"""The model and the prompt that the flags of tools/trace.py describe."""

import sys
from argparse import Namespace

import numpy as np
from common import Progress, available_memory_bytes

import npinfer
from costmodel import report
from costmodel.memory import numeric_memory_bytes
from npinfer.seeded import random_source

DIMENSIONS = {
    "--layers": "n_layers",
    "--d-model": "d_model",
    "--heads": "n_heads",
    "--kv-heads": "n_kv_heads",
    "--head-dim": "head_dim",
    "--d-ff": "d_ff",
    "--vocab": "vocab_size",
}
LOGITS_ERROR_BYTES = 64  # for each logit compared: two float32, and some float64 of work


def make_model(args, seed):
    """The model that the flags describe, numeric or shape-only; refuses a numeric one that does not fit."""
    config, precision, checkpoint = described(args)
    if args.stop and not config.eos_token_ids:
        raise npinfer.InputError(f"--stop needs a config that says which token ends a text, and {config.name} says none")
    if args.experts and not config.experts:
        raise npinfer.InputError(f"--experts is for models that have some, and {config.name} has none; leave it out")
    n_positions = args.prompt_tokens + args.output_tokens - 1
    if config.learned_positions and n_positions > config.max_context:
        raise npinfer.InputError(
            f"{config.name} has learned {config.max_context} positions and {n_positions} are asked for; "
            "use fewer --prompt-tokens or --output-tokens"
        )
    if not args.numeric:
        return npinfer.Transformer.shape_only(config, precision, args.experts or "expected")
    source, options = random_source(seed), {}
    if checkpoint is not None:
        source, options = checkpoint.source, {"stored": checkpoint.precision, "gain_offset": checkpoint.gain_offset}
    precision.check_numeric(options.get("stored"))
    pack = must_pack(config, precision, args)
    progress = Progress("weights", report.n_tensors(config))

    def counted(*tensor):
        progress()
        return source(*tensor)

    return npinfer.Transformer(config, precision, counted, pack=pack, **options)


def exact_model(args, seed):
    """The model that the flags describe, weights and KV in fp32 all the same."""
    return make_model(Namespace(**{**vars(args), "weights": "fp32", "kv": "fp32"}), seed)


def described(args):
    """Config, precision, and the checkpoint or None."""
    sizes = {name: getattr(args, flag[2:].replace("-", "_")) for flag, name in DIMENSIONS.items()}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    formats = {name: getattr(args, name) for name in ("weights", "kv", "activations", "bits_per_weight")}
    formats = {name: format_ for name, format_ in formats.items() if format_ is not None}
    if args.checkpoint is None:
        config = npinfer.preset(args.model) if args.config is None else npinfer.ModelConfig.from_hf(args.config)
        return config.resized(**sizes), npinfer.Precision(**formats), None
    from npinfer.checkpoint import read_checkpoint

    if args.numeric and sizes:
        raise npinfer.InputError("a numeric run of a checkpoint has the checkpoint's shape; leave out the dimensions")
    checkpoint = read_checkpoint(args.checkpoint)
    return checkpoint.config.resized(**sizes), checkpoint.precision(**formats), checkpoint


def must_pack(config, precision, args):
    """Whether a numeric run fits only with its weights in their format; says what memory it needs, or refuses it."""
    needed, available = needed_bytes(config, precision, args), available_memory_bytes()
    if available is None or needed <= available:
        print(f"numeric run: needs about {needed / 1e9:.2f} GB of memory", file=sys.stderr)
        return False
    least = needed
    if not args.logits_error:  # which holds a model in fp32 too
        least = min(needed, needed_bytes(config, precision, args, pack=True))
    if least > available:
        raise npinfer.InputError(
            f"a numeric run needs about {least / 1e9:.2f} GB of memory and {available / 1e9:.2f} GB is available; "
            "leave out --numeric for exact counts without arrays, or make the model smaller (--layers, --d-model)"
        )
    print(
        f"numeric run: needs about {least / 1e9:.2f} GB of memory, weights kept in {precision.weights} and slower for it: "
        f"as float32 it would need {needed / 1e9:.2f} GB of the {available / 1e9:.2f} GB available",
        file=sys.stderr,
    )
    return True


def needed_bytes(config, precision, args, pack=False):
    """Memory of the run that the flags describe."""
    needed = numeric_memory_bytes(config, precision, args.batch, args.prompt_tokens, args.output_tokens, pack)
    if args.logits_error:
        needed += LOGITS_ERROR_BYTES * args.batch * args.prompt_tokens * config.vocab_size
    return needed


class Text:
    """A prompt as ids, and what the model makes of it: printed to standard error as it comes, and kept.

    Parameters
    ----------
    prompt : str
    path : str
        Of the checkpoint, which the tokenizer comes with.
    """

    def __init__(self, prompt, path):
        from npinfer.text import tokenizer_of

        self.tokenizer = tokenizer_of(path)
        self.prompt_ids, self.ids = self.tokenizer.encode(prompt), []
        if not self.prompt_ids:
            raise npinfer.InputError(f"--prompt is {prompt!r}, which has no tokens; expected some text")
        self._read = self.tokenizer.reader()

    def __call__(self, ids):
        """Take the token of the first sequence; all have the same prompt."""
        self.ids.append(int(ids[0]))
        print(self._read(ids[0]), end="", file=sys.stderr, flush=True)

    def end(self):
        """End the line, if there is any."""
        if self.ids:
            print(file=sys.stderr)

    def tokens(self, batch):
        """The prompt as ids (batch, n_prompt)."""
        return np.tile(self.prompt_ids, (batch, 1))

    def report(self):
        """What was read, for the report."""
        return {"text": self.tokenizer.decode(self.ids), "tokens": self.ids}
