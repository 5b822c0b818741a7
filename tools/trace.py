#!/usr/bin/env python3
"""Run a request through a model, count every byte and FLOP, and predict its time on a GPU.

    python tools/trace.py --layers 32 --kv-heads 8
    python tools/trace.py --model llama-3-8b --gpu h100-sxm --gpu a100-sxm-80gb --weights int8
    python tools/trace.py --checkpoint DIR --numeric --prompt-tokens 32 --output-tokens 16
    python tools/trace.py --checkpoint model.gguf --numeric --prompt "The capital of France is" --output-tokens 16
"""

import numpy as np
from common import Parser, Progress, run, write
from trace_model import DIMENSIONS, Text, exact_model, make_model
from trace_text import as_text

import costmodel
import npinfer
from costmodel import prediction, report
from npinfer.checks import whole
from npinfer.formats import ALLOWED
from npinfer.generate import no_tokens

MAX_OUTPUT_TOKENS = 2**17  # a shape-only step still takes some 50 us


def parser():
    parser = Parser(prog="trace.py", description=__doc__)
    where = parser.add_argument_group("model").add_mutually_exclusive_group()
    where.add_argument("--model", metavar="NAME", default="mistral-7b", help="a known shape (default mistral-7b), see --list-models")
    where.add_argument("--config", metavar="FILE", help="the shape of a published config.json")
    where.add_argument("--checkpoint", metavar="PATH", help="a folder with config.json and *.safetensors, or a model.gguf")
    shape = parser.add_argument_group("single dimensions, in place of the model's")
    for flag in DIMENSIONS:
        shape.add_argument(flag, type=int, metavar="N")
    request = parser.add_argument_group("request")
    prompt = request.add_mutually_exclusive_group()
    prompt.add_argument("--prompt-tokens", type=int, default=1000, metavar="N", help="of each sequence (default 1000)")
    prompt.add_argument("--prompt", metavar="TEXT", help="of each sequence, in the words of the checkpoint's tokenizer")
    request.add_argument("--output-tokens", type=int, default=100, metavar="N", help="of each sequence (default 100)")
    request.add_argument("--prefix-tokens", type=int, default=0, metavar="N", help="the first N prompt tokens are cached: with and without")
    request.add_argument("--turns", metavar="N,N,...", help="prompt lengths of a dialogue: with and without a session cache")
    request.add_argument("--batch", type=int, default=1, metavar="N", help="sequences (default 1)")
    chosen = parser.add_argument_group("choice of tokens (default the likeliest)")
    chosen.add_argument("--temperature", type=float, metavar="X", help="draw them; above 1 evens the probabilities out")
    chosen.add_argument("--top-k", type=int, metavar="N", help="draw from the N likeliest")
    chosen.add_argument("--top-p", type=float, metavar="X", help="draw from the likeliest that have this probability in sum")
    chosen.add_argument("--stop", action="store_true", help="with --numeric: end at the model's end-of-text token")
    formats = parser.add_argument_group("storage formats (default fp16; a checkpoint's own, with fp32 KV and activations)")
    for kind, names in ALLOWED.items():
        formats.add_argument(f"--{kind}", metavar="FORMAT", help=" ".join(names))
    formats.add_argument("--bits-per-weight", type=float, metavar="X", help="average bits of mixed formats, scales included")
    device = parser.add_argument_group("device")
    device.add_argument("--gpu", action="append", metavar="NAME|FILE.toml", help="may be repeated (default rtx-4090), see --list-gpus")
    device.add_argument("--compute", metavar="FORMAT", help="matmul rate to use: fp16, fp16-fp16acc, bf16, fp8, int8 (default the engine's: mostly the activations')")
    device.add_argument("--engine", metavar="NAME", default="generic", help="of the expected level: vllm, llama.cpp, ... (default generic)")
    device.add_argument("--gpus", type=int, metavar="N", default=1, help="tensor-parallel devices (default 1)")
    mode = parser.add_argument_group("run and output")
    mode.add_argument("--numeric", action="store_true", help="compute on real arrays, and measure; text goes to standard error")
    mode.add_argument("--experts", choices=("expected", "all"), help="whose weights are read where no tokens choose (default expected)")
    mode.add_argument("--logits-error", action="store_true", help="with --numeric: what the formats cost, against fp32 weights and KV")
    mode.add_argument("--seed", type=int, default=0, metavar="N", help="of random weights and tokens, and of draws (default 0)")
    mode.add_argument("--detail", choices=("phase", "op", "layer", "step"), default="phase", help="rows of the counts (default phase)")
    mode.add_argument("--explain", action="store_true", help="the formula of each headline number, its values, and the textbook's section")
    mode.add_argument("--advise", action="store_true", help="what to change first, and what each change would save")
    mode.add_argument("--format", choices=("table", "json", "csv", "chrome"), default="table", help="chrome: the predicted timeline, for Perfetto")
    mode.add_argument("--output", metavar="FILE", help="write there instead of printing")
    mode.add_argument("--list-gpus", action="store_true")
    mode.add_argument("--list-models", action="store_true")
    mode.add_argument("--version", action="store_true")
    return parser


def main(argv):
    args = parser().parse_args(argv)
    if args.version or args.list_gpus or args.list_models:
        names = [version()] if args.version else costmodel.gpus() if args.list_gpus else npinfer.presets()
        return write("\n".join(names), args.output)
    if args.output_tokens > MAX_OUTPUT_TOKENS:
        raise npinfer.InputError(
            f"--output-tokens is {args.output_tokens}, expected at most {MAX_OUTPUT_TOKENS} steps of a run; "
            "costmodel.predict takes any number"
        )
    check_together(args)
    text = None if args.prompt is None else Text(args.prompt, args.checkpoint)
    if text:
        args.prompt_tokens = len(text.prompt_ids)
    size = report.whole_request(args.batch, args.prompt_tokens, args.output_tokens)
    n_prefix = whole("--prefix-tokens", args.prefix_tokens, least=0, most=args.prompt_tokens)
    turns = whole_list("--turns", args.turns)
    seed = whole("--seed", args.seed, least=0)
    gpus = [costmodel.gpu(name) for name in args.gpu or ["rtx-4090"]]
    options = {"sampler": sampler_of(args, seed), "stop": args.stop, "explain": args.explain, "advise": args.advise}
    options |= {"engine": args.engine, "n_gpus": args.gpus}
    model = make_model(args, seed)
    devices = [prediction.device(model.config, model.precision, gpu, args.engine, args.gpus, args.compute) for gpu in gpus]
    tokens = prompt_ids(args, text, model.config.vocab_size, size, seed)
    shown = text if text and args.numeric else Progress("token", args.output_tokens)
    try:
        result, ledger = report.trace(model, tokens, args.output_tokens, gpus, args.compute, n_prefix, turns, shown, **options)
    finally:
        shown.end()
    if text:
        result["request"]["prompt"] = args.prompt
        result["measured"] = result["measured"] and result["measured"] | text.report()
    if args.logits_error:
        from npinfer.compare import logits_error

        logits = prompt_logits(model, tokens)
        del model  # or two models would be held at once
        result["measured"]["logits_error"] = logits_error(logits, prompt_logits(exact_model(args, seed), tokens))._asdict()
    if args.detail == "layer":
        result["layers"] = report.by_layer(ledger)
    if args.detail == "step":
        result["steps"] = report.by_step(ledger)
    if args.format == "json":
        import json

        return write(json.dumps(result, indent=1), args.output)
    if args.format == "csv":
        from trace_export import as_csv

        return write(as_csv(result, args.detail), args.output)
    if args.format == "chrome":
        from trace_export import as_chrome

        return write(as_chrome(ledger, devices), args.output)
    write(as_text(result, args.detail), args.output)


def check_together(args):
    """Refuse flags that do not go together."""
    if args.logits_error and not args.numeric:
        raise npinfer.InputError("--logits-error compares logits, which only a numeric run has; add --numeric")
    if args.stop and not args.numeric:
        raise npinfer.InputError("--stop waits for a token, which only a numeric run has; add --numeric")
    if args.experts and args.numeric:
        raise npinfer.InputError("--experts is a rule for runs without tokens; a numeric one reads those that its tokens choose")
    if args.prompt is not None and args.checkpoint is None:
        raise npinfer.InputError("--prompt needs a tokenizer, which a --checkpoint comes with; give one, or --prompt-tokens")
    if args.prompt == "":
        raise npinfer.InputError("--prompt is empty, expected some text")


def sampler_of(args, seed):
    """The sampler that the flags describe; None: the likeliest token."""
    given = {name: getattr(args, name) for name in ("temperature", "top_k", "top_p") if getattr(args, name) is not None}
    return npinfer.Sampler(**given, seed=seed) if given else None


def prompt_ids(args, text, vocab_size, size, seed):
    """Ids (batch, n_prompt): those of the text, random ones, or none that matter."""
    if text:
        return text.tokens(args.batch)
    if args.numeric:
        return np.random.default_rng(seed).integers(vocab_size, size=size)
    return no_tokens(size)


def whole_list(name, text):
    """Whole numbers from text such as "800,1200"; none from None."""
    try:
        return [] if text is None else [int(number) for number in text.split(",")]
    except ValueError:
        raise npinfer.InputError(f"{name} is {text!r}, expected whole numbers such as 800,1200,1600") from None


def version():
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"npinfer {version('npinfer')}"
    except PackageNotFoundError:
        raise npinfer.InputError("npinfer is not installed, so it has no version; pip install .") from None


def prompt_logits(model, tokens):
    """Logits of a numeric model at every position of the prompt."""
    return model.prefill(tokens, model.new_cache(len(tokens)), all_logits=True)


if __name__ == "__main__":
    run(main)
