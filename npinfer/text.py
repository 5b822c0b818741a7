"""Text to token ids and back, by the tokenizer that a model comes with.

The work is done by the tokenizers package.  A tokenizer.json it reads by
itself; from the lists in a GGUF file the same tokenizer is put together here.

Read `Tokenizer` (what a caller gets), then `from_metadata`, then `tokenizer_of`.
"""

import os

from npinfer.errors import CheckpointError, ConfigError, InputError
from npinfer.gguf_file import open_gguf

CONTROL, USER_DEFINED = 3, 4  # tokens found in the text before it is split, by their type in a GGUF file

_NUMBER = r"\p{N}"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Patterns that split a text into words, one after another, by tokenizer.ggml.pre.
# Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp, llm_tokenizer_bpe.
SPLITS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (_NUMBER, _GPT2),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace("{1,3}", ""),),
}
WHOLE_WORDS = ("llama-bpe",)  # a word in the vocabulary is one token, whatever the merges say
BEGUN = ("llama-bpe",)  # texts begin with the bos token, unless tokenizer.ggml.add_bos_token says otherwise


def tokenizers_package():
    """The tokenizers package, or an `InputError` that names the extra it comes with."""
    try:
        import tokenizers
        import tokenizers.decoders  # a submodule, not loaded by itself in every version
    except ImportError:
        raise InputError('text needs the tokenizers package; pip install "npinfer[hf]"') from None
    return tokenizers


class Tokenizer:
    """Text to ids and back; made by `tokenizer_of`.

    Parameters
    ----------
    inner : tokenizers.Tokenizer
    """

    def __init__(self, inner):
        self._inner = inner

    def encode(self, text):
        """Ids of a text, a list; what stands for a special token in it becomes that token."""
        try:
            return self._inner.encode(text).ids
        except (TypeError, UnicodeEncodeError):
            raise InputError(f"text is {text!r:.60}, expected a str of whole characters") from None

    def decode(self, ids):
        """Text of ids, special tokens left out."""
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=True)

    def reader(self):
        """A function that takes one id after another and gives the text each adds.

        That is "" while a character is not complete.
        """
        stream = tokenizers_package().decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._inner, int(token)) or ""


def from_metadata(metadata):
    """The `Tokenizer` whose lists are in the metadata of a GGUF file (`npinfer.gguf_file.GgufFile.metadata`).

    Raises
    ------
    ConfigError
        If it is of a kind that is not read, or its lists do not fit each other.
    """
    tokenizers = tokenizers_package()
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    kind, pre = given.get("model"), given.get("pre", "default")
    for key, value, known in (("model", kind, ["gpt2"]), ("pre", pre, list(SPLITS))):
        if value not in known:
            raise ConfigError(f"tokenizer.ggml.{key} is {value!r:.60}, which is not supported; supported: {', '.join(known)}")
    tokens, types, merges = _texts(given, "tokens"), given.get("token_type"), _texts(given, "merges")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ConfigError("tokenizer.ggml.token_type is no list as long as tokens")

    ids = {token: id for id, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        model = tokenizers.models.BPE(ids, pairs, ignore_merges=pre in WHOLE_WORDS)
    except Exception as error:  # the package raises no finer class
        raise ConfigError(f"tokenizer.ggml.merges do not fit the tokens ({error!s:.120})") from None
    inner = tokenizers.Tokenizer(model)
    words = tokenizers.pre_tokenizers
    splits = [words.Split(tokenizers.Regex(pattern), "isolated") for pattern in SPLITS[pre]]
    inner.pre_tokenizer = words.Sequence([*splits, words.ByteLevel(add_prefix_space=False, use_regex=False)])
    inner.decoder = tokenizers.decoders.ByteLevel()
    for token, type in zip(tokens, types):
        if type in (CONTROL, USER_DEFINED):
            inner.add_tokens([tokenizers.AddedToken(token, special=type == CONTROL, normalized=False)])
    ends = _ends(given, pre, tokens)
    if any(ends):
        special = [(tokens[id], id) for id in {*ends[0], *ends[1]}]
        around = [f"{tokens[id]}:0" for id in ends[0]] + ["$A:0"] + [f"{tokens[id]}:0" for id in ends[1]]
        inner.post_processor = tokenizers.processors.TemplateProcessing(single=around, special_tokens=special)
    return Tokenizer(inner)


def _texts(given, key):
    values = given.get(key)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ConfigError(f"tokenizer.ggml.{key} is no list of texts")
    return values


def _ends(given, pre, tokens):
    """Ids that stand before and behind every text, two lists."""
    ends = []
    for name, usual in (("bos", pre in BEGUN), ("eos", False)):
        id = given.get(f"{name}_token_id")
        adds = given.get(f"add_{name}_token", usual)
        if adds and (type(id) is not int or id >= len(tokens)):
            raise ConfigError(f"tokenizer.ggml.{name}_token_id is {id!r:.60}, expected one of the {len(tokens)} tokens")
        ends.append([id] if adds else [])
    return ends


def tokenizer_of(path):
    """The tokenizer that a model comes with.

    Parameters
    ----------
    path : str or path
        A GGUF file, a tokenizer.json, or the folder that holds one.

    Returns
    -------
    Tokenizer

    Raises
    ------
    CheckpointError
        If the file cannot be read.
    ConfigError
        If it is a tokenizer that is not supported.
    InputError
        If the tokenizers package (or, for a GGUF file, the gguf package) is missing.
    """
    path = os.fspath(path)
    tokenizers = tokenizers_package()
    if path.endswith(".gguf"):
        try:
            return from_metadata(open_gguf(path).metadata)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    if os.path.isdir(path):
        path = os.path.join(path, "tokenizer.json")
    try:
        with open(path, encoding="utf-8") as file:
            return Tokenizer(tokenizers.Tokenizer.from_str(file.read()))
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); expected a tokenizer.json, or the folder that holds one"
        ) from None
    except Exception as error:  # the package raises no finer class
        raise CheckpointError(
            f"{path}: is no tokenizer that the tokenizers package reads ({error!s:.120}); download it again"
        ) from None
