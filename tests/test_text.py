"""Tokenizers: from a tokenizer.json and from the lists in a GGUF file, text to ids and back."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npinfer import CheckpointError, ConfigError, InputError
from npinfer.text import from_metadata, tokenizer_of

tokenizers = pytest.importorskip("tokenizers", reason='the tokenizers package is not installed: pip install "npinfer[hf]"')

# Byte-level BPE writes a space as this, and other bytes that are no letters likewise; letters are themselves.
SPACE = "\u0120"
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGES = [("a", "b"), (SPACE, "ab"), ("ab", "ab"), ("1", "2"), ("'", "s"), ("c", "ab")]
SPECIAL = ["<s>", "</s>", "<|user|>", "<extra>"]
TOKENS = SPECIAL + BYTES + ["".join(merge) for merge in MERGES]


def metadata(**keys):
    given = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [3, 3, 3, 4] + [1] * (len(TOKENS) - 4),
        "merges": [" ".join(merge) for merge in MERGES],
        "bos_token_id": 0,
        "eos_token_id": 1,
    } | keys
    return {f"tokenizer.ggml.{key}": value for key, value in given.items() if value is not None}


def pieces(tokenizer, text):
    return [TOKENS[id] for id in tokenizer.encode(text)]


# ---- from the lists of a GGUF file


def test_merges_by_hand():
    tokenizer = from_metadata(metadata())
    assert pieces(tokenizer, "abab ab") == ["abab", SPACE + "ab"]
    assert pieces(tokenizer, "cab's 12") == ["cab", "'s", SPACE, "12"]  # a word: ab is merged first, then c with it


@pytest.mark.parametrize(
    "pre, expected",
    [
        ("gpt-2", ["12", "1", "x", "="]),  # digits are one word
        ("smollm", ["1", "2", "1", "x", "="]),  # each digit is a word
        ("qwen2", ["1", "2", "1", "x", "="]),
        ("llama-bpe", ["<s>", "12", "1", "x", "="]),  # three digits are a word; texts begin with <s>
        ("default", ["12", "1", "x", "="]),
    ],
)
def test_words_by_pre_tokenizer(pre, expected):
    assert pieces(from_metadata(metadata(pre=pre)), "121x=") == expected


def test_no_pre_tokenizer_is_the_default():
    assert from_metadata(metadata(pre=None)).encode("a==12b") == from_metadata(metadata(pre="default")).encode("a==12b")


def test_words_of_punctuation_and_of_case():
    """Punctuation stays with no letter in the default; a contraction in capitals is one word only for llama-bpe and qwen2."""
    tokens = TOKENS + ["'S", "=" + "\u010a"]
    keys = {
        "tokens": tokens,
        "token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4),
        "merges": [" ".join(merge) for merge in [*MERGES, ("'", "S"), ("=", "\u010a")]],
        "add_bos_token": False,
    }
    lengths = {pre: len(from_metadata(metadata(**keys, pre=pre)).encode("x'S=\n")) for pre in ("gpt-2", "qwen2", "llama-bpe")}
    # gpt-2: x, ' is a word without the S behind it, S, =, newline; the others: x, 'S, = with the newline.
    assert lengths == {"gpt-2": 5, "qwen2": 3, "llama-bpe": 3}


def test_a_whole_word_of_llama3_needs_no_merges():
    tokens = TOKENS + ["xyz"]
    keys = {"tokens": tokens, "token_type": [3, 3, 3, 4] + [1] * (len(tokens) - 4), "add_bos_token": False}
    assert from_metadata(metadata(**keys, pre="llama-bpe")).encode("xyz") == [len(TOKENS)]
    assert len(from_metadata(metadata(**keys, pre="gpt-2")).encode("xyz")) == 3


def test_special_tokens_are_found_in_the_text():
    tokenizer = from_metadata(metadata())
    assert pieces(tokenizer, "ab<|user|>ab<extra>ab") == ["ab", "<|user|>", "ab", "<extra>", "ab"]
    assert tokenizer.decode(tokenizer.encode("ab<|user|>ab<extra>ab")) == "abab<extra>ab"  # control tokens are no text


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({}, ["ab"]),
        ({"add_bos_token": True}, ["<s>", "ab"]),
        ({"add_bos_token": True, "add_eos_token": True}, ["<s>", "ab", "</s>"]),
        ({"add_eos_token": True, "eos_token_id": 0}, ["ab", "<s>"]),
        ({"pre": "llama-bpe"}, ["<s>", "ab"]),
        ({"pre": "llama-bpe", "add_bos_token": False}, ["ab"]),
    ],
)
def test_tokens_around_a_text(keys, expected):
    tokenizer = from_metadata(metadata(**keys))
    assert pieces(tokenizer, "ab") == expected
    assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


@given(text=st.text(), pre=st.sampled_from(["default", "gpt-2", "smollm", "llama-bpe", "qwen2"]))
@example(text="Gr\u00fc\u00dfe \u4f60\u597d \U0001f642 don't  x\n\n\ty  ", pre="smollm")
def test_decoding_gives_the_text_back(text, pre):
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = from_metadata(metadata(pre=pre))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.array(ids, int)) == text


@given(text=st.text(min_size=1))
def test_a_reader_gives_the_same_text_piece_by_piece(text):
    text = text.encode("utf-8", "ignore").decode()
    tokenizer = from_metadata(metadata())
    assert "".join(map(tokenizer.reader(), tokenizer.encode(text))) == text


def test_a_reader_waits_for_the_end_of_a_character():
    tokenizer = from_metadata(metadata())
    read = tokenizer.reader()
    assert [read(id) for id in tokenizer.encode("a\u00fcb")] == ["a", "", "\u00fc", "b"]


@pytest.mark.parametrize(
    "keys, match",
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama', which is not supported; supported: gpt2"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre is 'tekken', which is not supported; supported: default, gpt-2, smollm"),
        ({"tokens": None}, "tokenizer.ggml.tokens is no list of texts"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is no list of texts"),
        ({"merges": "a b"}, "tokenizer.ggml.merges is no list of texts"),
        ({"merges": ["a nothing"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges do not fit the tokens"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type is no list as long as tokens"),
        ({"token_type": None}, "tokenizer.ggml.token_type is no list as long as tokens"),
        ({"add_bos_token": True, "bos_token_id": None}, "bos_token_id is None, expected one of"),
        ({"add_eos_token": True, "eos_token_id": 10**6}, "eos_token_id is 1000000, expected one of"),
    ],
)
def test_lists_that_are_no_tokenizer(keys, match):
    with pytest.raises(ConfigError, match=match):
        from_metadata(metadata(**keys))


def test_text_that_is_none():
    for text in (None, 3, "\ud800"):
        with pytest.raises(InputError, match="expected a str of whole characters"):
            from_metadata(metadata()).encode(text)


# ---- from files


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer.json: bytes of a text, and <s> before it."""
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content = {
        "added_tokens": [{"id": 0, "content": "<s>", **added}],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "model": {"type": "BPE", "vocab": {token: id for id, token in enumerate(["<s>", *BYTES])}, "merges": []},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    return tmp_path


def test_a_tokenizer_json(folder):
    for path in (folder, folder / "tokenizer.json", str(folder)):
        tokenizer = tokenizer_of(path)
        assert tokenizer.encode("ab") == [0, 1 + BYTES.index("a"), 1 + BYTES.index("b")]
        assert tokenizer.decode(tokenizer.encode("ab")) == "ab"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Nothing"}}'])
def test_a_damaged_tokenizer_json(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="tokenizer.json: is no tokenizer .*download it again"):
        tokenizer_of(folder)


def test_a_tokenizer_that_is_not_there(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json: cannot be read .*expected a tokenizer.json"):
        tokenizer_of(folder)


def test_the_tokenizer_inside_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf", reason='the gguf package is not installed: pip install "npinfer[gguf]"')
    path = tmp_path / "model.gguf"
    for model in ("gpt2", "llama"):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3, 3, 4] + [1] * (len(TOKENS) - 4))
        writer.add_token_merges([" ".join(merge) for merge in MERGES])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if model == "gpt2":
            assert pieces(tokenizer_of(path), "abab 12<s>") == ["abab", SPACE, "1", "2", "<s>"]
        else:
            with pytest.raises(ConfigError, match=r"model\.gguf: tokenizer\.ggml\.model is 'llama', which is not supported"):
                tokenizer_of(path)


def test_a_missing_package_names_its_extra(folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(InputError, match=r'needs the tokenizers package; pip install "npinfer\[hf\]"'):
        tokenizer_of(folder)
