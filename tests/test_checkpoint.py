"""Checkpoints whose tensors and config.json do not fit each other: what is refused, with which words, and what is not.

Faults of a single safetensors file are in test_safetensors.py, translation of config.json is in test_hf.py.
"""

import json
import shutil
from pathlib import Path
from time import perf_counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import npinfer
from costmodel.experts import observed
from costmodel.formulas import forward_counts
from npinfer import CheckpointError, ConfigError, InputError, Precision, Transformer, UnknownName
from npinfer.checkpoint import read_checkpoint
from npinfer.safetensors import open_folder
from test_safetensors import INDEX, STORED, encode, write

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
FP32 = Precision("fp32", "fp32", "fp32")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture
def checkpoint(tmp_path):
    """A function that copies a golden case, with changes to its tensors and config.json, and gives the folder.

    `change` is called with the dict {name: (dtype, array)} of all tensors and may alter it; other keywords are
    keys of config.json, None taking a key away.
    """

    def make(case="llama-gqa", change=None, **keys):
        folder = tmp_path / case
        shutil.copytree(GOLDEN / case, folder)
        config = json.loads((folder / "config.json").read_text()) | keys
        config = {key: value for key, value in config.items() if value is not None or key not in keys}
        (folder / "config.json").write_text(json.dumps(config))
        if change:
            tensors = tensors_of(folder)
            change(tensors)
            for path in [*folder.glob("*.safetensors"), *folder.glob(INDEX)]:
                path.unlink()
            write(folder, model=encode(tensors))
        return folder

    return make


def tensors_of(folder):
    opened = open_folder(folder)
    return {name: (DTYPES[opened.dtype(name)], opened.read(name).copy()) for name in opened.names()}


def stored_as(dtype, *names):
    """A change that stores these tensors, which are F32, in another format; all of them if none is named."""

    def change(tensors):
        for name in names or list(tensors):
            array = tensors[name][1]
            upper_half = array.view(np.uint32) >> np.uint32(16)
            tensors[name] = dtype, upper_half if dtype == "BF16" else array.astype(STORED[dtype])

    return change


def logits(folder, precision=None):
    """Of the case's own prompt, at the last position."""
    model = Transformer.from_checkpoint(folder, precision=precision)
    with np.load(GOLDEN / folder.name / "expected.npz") as expected:
        tokens = expected["tokens"]
    return model.prefill(tokens, model.new_cache(len(tokens)))


def ours(folder, name, layer, shape, expert=None):
    """One tensor in this project's layout; its shape is checked."""
    values = read_checkpoint(folder).source(name, layer, shape, expert)
    assert (values.shape, values.dtype) == (shape, np.float32)
    return values


def refused(folder, match, error=CheckpointError, **options):
    """The message that the checkpoint is refused with, one line that begins with its path."""
    with pytest.raises(error, match=match) as caught:
        Transformer.from_checkpoint(folder, **options)
    message = str(caught.value)
    assert message.startswith(str(folder))
    assert "\n" not in message
    return message


def test_a_copy_runs_like_the_original(checkpoint):
    folder = checkpoint(change=lambda tensors: None)
    assert logits(folder).tolist() == logits(GOLDEN / "llama-gqa").tolist()


# ---- tensors that are not those of the config


def test_a_missing_tensor_is_named(checkpoint):
    message = refused(checkpoint(change=lambda tensors: tensors.pop(Q_PROJ)), "1 tensors of the config are missing")
    assert repr(Q_PROJ) in message
    assert "check that config.json and weights belong together" in message


@pytest.mark.parametrize("name", [HEAD, EMBED, "model.norm.weight", "model.layers.0.input_layernorm.weight"])
def test_no_tensor_can_be_left_out(checkpoint, name):
    refused(checkpoint(change=lambda tensors: tensors.pop(name)), f"missing, first '{name}'")


def test_an_extra_tensor_is_named(checkpoint):
    def add(tensors):
        tensors["model.layers.0.self_attn.q_norm.weight"] = "F32", np.ones(8, np.float32)

    message = refused(checkpoint(change=add), r"1 tensors have no place in the config, first '.*\.q_norm\.weight'")
    assert "check config.json" in message


def test_biases_that_the_config_does_not_have(checkpoint):
    refused(checkpoint("llama-mqa-bias", attention_bias=False), r"8 tensors have no place.*self_attn\.k_proj\.bias")


def test_biases_that_the_weights_do_not_have(checkpoint):
    refused(checkpoint(mlp_bias=True), r"6 tensors of the config are missing, first .*mlp\.down_proj\.bias")


def test_a_layer_too_few_in_the_config(checkpoint):
    refused(checkpoint(num_hidden_layers=1), r"9 tensors have no place in the config.*model\.layers\.1\.")


def test_a_layer_too_many_in_the_config(checkpoint):
    refused(checkpoint(num_hidden_layers=3), r"9 tensors of the config are missing, first 'model\.layers\.2\.")


def test_a_tensor_of_another_shape(checkpoint):
    def transpose(tensors):
        dtype, array = tensors["model.layers.0.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = dtype, array.T

    message = refused(checkpoint(change=transpose), r"model\.layers\.0\.mlp\.up_proj\.weight is \(32, 80\)")
    assert "expected (80, 32) by config.json" in message


@pytest.mark.parametrize(
    "keys, match",
    [
        ({"hidden_size": 64}, r"embed_tokens\.weight is \(101, 32\), expected \(101, 64\)"),
        ({"vocab_size": 102}, r"embed_tokens\.weight is \(101, 32\), expected \(102, 32\)"),
        ({"intermediate_size": 81}, r"gate_proj\.weight is \(80, 32\), expected \(81, 32\)"),
        ({"num_key_value_heads": 4}, r"k_proj\.weight is \(16, 32\), expected \(32, 32\)"),
        ({"num_key_value_heads": 1}, r"k_proj\.weight is \(16, 32\), expected \(8, 32\)"),
        ({"head_dim": 16}, r"q_proj\.weight is \(32, 32\), expected \(64, 32\)"),
    ],
)
def test_a_size_of_the_config_that_the_tensors_contradict(checkpoint, keys, match):
    refused(checkpoint(**keys), match)


def test_a_vector_in_place_of_a_matrix_is_no_broadcast(checkpoint):
    def flatten(tensors):
        tensors["model.norm.weight"] = "F32", np.ones((1, 32), np.float32)

    refused(checkpoint(change=flatten), r"model\.norm\.weight is \(1, 32\), expected \(32,\)")


@pytest.mark.parametrize("n_layers", [10_000, 65_536])
def test_more_layers_than_tensors_is_refused_at_once(checkpoint, n_layers):
    folder = checkpoint(num_hidden_layers=n_layers)
    start = perf_counter()
    message = refused(folder, f"config.json has {n_layers} layers but only 21 tensors are stored")
    assert perf_counter() - start < 1
    assert "do they belong together" in message


@pytest.mark.parametrize("case, layers", [("mixtral-moe", 2), ("qwen3-moe", 1), ("deepseek-v3", 1)])
@pytest.mark.parametrize("n_experts", [1000, 2**31])
def test_more_experts_than_tensors_is_refused_at_once(checkpoint, case, layers, n_experts):
    key = "n_routed_experts" if case == "deepseek-v3" else "num_local_experts"
    refused(checkpoint(case, **{key: n_experts}), f"config.json has {layers * n_experts} experts in all layers but only")


def test_experts_that_are_stored_as_one_are_refused_by_shape(checkpoint):
    refused(checkpoint("gpt-oss", num_local_experts=2**31), r"is \(4, .*expected \(2147483648, ")


def test_absurdly_many_layers_are_no_model(checkpoint):
    refused(checkpoint(num_hidden_layers=10**11), "n_layers is 100000000000, expected from 1 to", ConfigError)


def test_tensors_of_a_dtype_that_is_not_run(checkpoint):
    def change(tensors):
        tensors[Q_PROJ] = "I64", tensors[Q_PROJ][1]

    refused(checkpoint(change=change), f"{Q_PROJ}.*I64")


# ---- what is accepted although nothing asks for it


def test_stored_rotary_frequencies_are_ignored(checkpoint):
    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", np.full(4, 9.0, np.float32)
        tensors["model.rotary_emb.inv_freq"] = "I64", np.arange(4)

    folder = checkpoint(change=add)
    assert logits(folder).tolist() == logits(GOLDEN / "llama-gqa").tolist()
    model = Transformer.from_checkpoint(folder)
    assert model.precision == FP32


def test_a_tied_head_may_be_stored_twice(checkpoint):
    def twice(tensors):
        tensors[HEAD] = tensors[EMBED]

    folder = checkpoint("llama-mha-tied", twice)
    assert logits(folder).tolist() == logits(GOLDEN / "llama-mha-tied").tolist()


@pytest.mark.parametrize(
    "head",
    [
        lambda embedding: np.nextafter(embedding, 1, dtype=np.float32),  # one bit
        lambda embedding: embedding[:-1],
        lambda embedding: embedding.T,
    ],
)
def test_a_tied_head_that_differs_is_refused(checkpoint, head):
    def differ(tensors):
        tensors[HEAD] = "F32", head(tensors[EMBED][1])

    refused(checkpoint("llama-mha-tied", differ), "lm_head.weight differs.*set tie_word_embeddings to false")


def test_untied_as_the_message_says_it_runs(checkpoint):
    """What the refusal of a differing head tells the user to do."""

    def negate(tensors):
        tensors[HEAD] = "F32", -tensors[EMBED][1]

    folder = checkpoint("llama-mha-tied", negate, tie_word_embeddings=False)
    assert logits(folder).tolist() == (-logits(GOLDEN / "llama-mha-tied")).tolist()


# ---- formats


@pytest.mark.parametrize("dtype, weights", [("F16", "fp16"), ("BF16", "bf16"), ("F32", "fp32")])
def test_the_stored_format_is_that_of_the_matrices(checkpoint, dtype, weights):
    model = Transformer.from_checkpoint(checkpoint(change=stored_as(dtype)))
    assert model.precision == Precision(weights=weights, kv="fp32", activations="fp32")


@pytest.mark.parametrize("case", ["llama-mqa-bias", "gemma3", "gpt2", "deepseek-v3", "gpt-oss"])
def test_vectors_keep_the_format_they_are_stored_in(checkpoint, case):
    """F32 gains and biases beside BF16 matrices: the logits are those of all that is stored, in float32."""
    matrices = [name for name, (_, array) in tensors_of(GOLDEN / case).items() if array.ndim > 1 and not name.endswith("bias")]
    folder = checkpoint(case, stored_as("BF16", *matrices))
    assert logits(folder).tolist() == logits(folder, FP32).tolist()
    model = Transformer.from_checkpoint(folder)
    assert model.precision.weights == "bf16"
    assert {(layer, str(format_)) for _, layer, format_ in model.precision.exceptions} == {(None, "fp32")}
    with npinfer.Ledger() as ledger:
        model.prefill([1, 2, 3], model.new_cache())
    touched = observed(ledger, model.config, model.precision, 0)
    assert ledger.total() == forward_counts(model.config, model.precision, 1, 0, 3, experts_touched=touched)


def test_a_mixture_of_formats_needs_a_precision(checkpoint):
    folder = checkpoint(change=stored_as("F16", Q_PROJ))
    message = refused(folder, "matrices are stored in fp16, fp32; say which format to hold them in")
    assert "precision=npinfer.Precision(...)" in message
    assert "--weights" in message
    assert Transformer.from_checkpoint(folder, precision=FP32).precision == FP32
    np.testing.assert_allclose(logits(folder, FP32), logits(GOLDEN / "llama-gqa"), atol=5e-3)


def test_a_mixture_is_rounded_to_the_format_that_is_asked_for(checkpoint):
    mixed, half = checkpoint(change=stored_as("F16", Q_PROJ)), Precision("fp16", "fp32", "fp32")
    assert logits(mixed, half).tolist() == logits(GOLDEN / "llama-gqa", half).tolist()


@pytest.mark.parametrize("weights", ["fp8"])
def test_formats_without_values_are_refused(checkpoint, weights):
    with pytest.raises(InputError, match=f"weights format '{weights}' is shape-only"):
        Transformer.from_checkpoint(checkpoint(), precision=Precision(weights=weights))


def test_an_unknown_format_is_refused():
    with pytest.raises(UnknownName, match="no weights format 'fp17'; known: fp32, fp16"):
        Precision(weights="fp17")


# ---- files


def test_a_folder_without_a_config(checkpoint):
    folder = checkpoint()
    (folder / "config.json").unlink()
    refused(folder, "config.json: cannot be read .*expected a config.json or the folder that holds one", ConfigError)


def test_a_config_that_is_no_json(checkpoint):
    folder = checkpoint()
    (folder / "config.json").write_text('{"model_type": "llama",')
    refused(folder, "config.json: is not JSON", ConfigError)


def test_a_folder_without_weights(checkpoint):
    folder = checkpoint()
    (folder / "model.safetensors").unlink()
    refused(folder, r"no \*\.safetensors")


@pytest.mark.parametrize("n_kept", [0, 7, 1000, -1])
def test_truncated_weights(checkpoint, n_kept):
    folder = checkpoint()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:n_kept])
    refused(folder, r"model\.safetensors.*download it")


def test_a_missing_shard(checkpoint):
    folder = checkpoint("llama-bf16-sharded")
    (folder / "model-00002-of-00002.safetensors").unlink()
    refused(folder, r"model-00002-of-00002\.safetensors")


def test_a_missing_index(checkpoint):
    folder = checkpoint("llama-bf16-sharded")
    (folder / INDEX).unlink()
    refused(folder, "download the index too")


def test_a_folder_that_is_not_there(tmp_path):
    refused(tmp_path / "nothing", "cannot be read", ConfigError)


def test_an_unsupported_family_is_refused_before_its_weights_are_looked_at(checkpoint):
    folder = checkpoint(model_type="gpt_neox", architectures=None)
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "model_type is 'gpt_neox', which is not supported; supported: llama, mistral", ConfigError)


def test_a_text_path_will_do(checkpoint):
    model = npinfer.Transformer.from_checkpoint(str(checkpoint()))
    assert model.config.name == "llama-gqa"


# ---- other families: where their tensors stand


@pytest.mark.parametrize("case", sorted(path.name for path in GOLDEN.iterdir()))
def test_every_tensor_of_a_golden_case_has_its_place(case):
    opened = read_checkpoint(GOLDEN / case)
    with np.load(GOLDEN / case / "expected.npz") as expected:
        n_parameters = int(expected["n_parameters"])
    # The correction of DeepSeek's router, one element an expert, is stored but no parameter.
    n_stored = sum(array.size for name, (_, array) in tensors_of(GOLDEN / case).items() if "correction_bias" not in name)
    assert n_stored == n_parameters
    assert opened.precision().weights == ("bf16" if case == "llama-bf16-sharded" else "fp32")


def raw(case):
    """The tensors of a golden case by published name, without what names of the first layer begin with."""
    return {name.replace("model.layers.0.", "").replace("transformer.h.0.", ""): array
            for name, (_, array) in tensors_of(GOLDEN / case).items()}  # fmt: skip


def test_fused_projections_are_cut_in_rows():
    stored, folder = raw("phi3-fused"), GOLDEN / "phi3-fused"
    qkv, gate_up = stored["self_attn.qkv_proj.weight"], stored["mlp.gate_up_proj.weight"]
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        assert ours(folder, name, 0, (32, 32)).tolist() == qkv[32 * place : 32 * place + 32].tolist()
    assert ours(folder, "gate_proj", 0, (80, 32)).tolist() == gate_up[:80].tolist()
    assert ours(folder, "up_proj", 0, (80, 32)).tolist() == gate_up[80:].tolist()


def test_fused_projections_with_fewer_kv_heads(checkpoint):
    def fewer(tensors):
        for layer in (0, 1):
            name = f"model.layers.{layer}.self_attn.qkv_proj.weight"
            tensors[name] = "F32", tensors[name][1][: 32 + 8 + 8]

    folder = checkpoint("phi3-fused", fewer, num_key_value_heads=1)
    qkv = raw("phi3-fused")["self_attn.qkv_proj.weight"]
    assert ours(folder, "k_proj", 0, (8, 32)).tolist() == qkv[32:40].tolist()
    assert ours(folder, "v_proj", 0, (8, 32)).tolist() == qkv[40:48].tolist()


def test_matrices_stored_the_other_way_are_turned():
    stored, folder = raw("gpt2"), GOLDEN / "gpt2"
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        columns = slice(32 * place, 32 * place + 32)
        assert ours(folder, name, 0, (32, 32)).tolist() == stored["attn.c_attn.weight"][:, columns].T.tolist()
        assert ours(folder, name + ".bias", 0, (32,)).tolist() == stored["attn.c_attn.bias"][columns].tolist()
    assert ours(folder, "down_proj", 0, (32, 128)).tolist() == stored["mlp.c_proj.weight"].T.tolist()
    assert ours(folder, "attn_norm.bias", 0, (32,)).tolist() == stored["ln_1.bias"].tolist()
    assert ours(folder, "positions", None, (128, 32)).tolist() == stored["transformer.wpe.weight"].tolist()


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_experts_in_one_tensor_with_alternating_columns(checkpoint, dtype):
    folder = checkpoint("gpt-oss", stored_as(dtype) if dtype == "BF16" else None)
    stored = {name.replace("model.layers.0.mlp.experts.", ""): array for name, (_, array) in tensors_of(folder).items()}
    if dtype == "BF16":
        stored = {name: (array.astype(np.uint32) << 16).view(np.float32) for name, array in stored.items()}
    for expert in range(4):
        gate_up, bias = stored["gate_up_proj"][expert], stored["gate_up_proj_bias"][expert]
        for first, name in enumerate(("gate_proj", "up_proj")):
            assert ours(folder, name, 0, (80, 32), expert).tolist() == gate_up[:, first::2].T.tolist()
            assert ours(folder, name + ".bias", 0, (80,), expert).tolist() == bias[first::2].tolist()
        assert ours(folder, "down_proj", 0, (32, 80), expert).tolist() == stored["down_proj"][expert].T.tolist()
        assert ours(folder, "down_proj.bias", 0, (32,), expert).tolist() == stored["down_proj_bias"][expert].tolist()
    assert ours(folder, "sinks", 0, (4,)).tolist() == (stored["model.layers.0.self_attn.sinks"].tolist())


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_gains_of_gemma_are_one_more_than_stored(case):
    stored, model = raw(case), Transformer.from_checkpoint(GOLDEN / case)
    names = {
        "attn_norm": "input_layernorm", "post_attn_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "post_mlp_norm": "post_feedforward_layernorm",
    }  # fmt: skip
    layer = model.weights.layers[0][2]
    for name, published in names.items():
        assert getattr(layer, name).args[0].data.tolist() == (1 + stored[published + ".weight"]).tolist()
    assert model.weights.final_norm.args[0].data.tolist() == (1 + stored["model.norm.weight"]).tolist()
    assert ours(GOLDEN / case, "embed", None, (101, 32)).tolist() == stored["model.embed_tokens.weight"].tolist()
    if case == "gemma3":
        assert layer.attention.k_norm.args[0].data.tolist() == (1 + stored["self_attn.k_norm.weight"]).tolist()


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
def test_gains_of_gemma_are_one_more_than_the_bf16_that_is_stored(checkpoint, case):
    """1 + 0.1 in bf16 would be 1.1015625; the 1 is added to what is stored, in float32."""
    folder = checkpoint(case, stored_as("BF16"))
    gain = (tensors_of(folder)["model.norm.weight"][1].astype(np.uint32) << 16).view(np.float32)
    assert Transformer.from_checkpoint(folder).weights.final_norm.args[0].data.tolist() == (1 + gain).tolist()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rows_of_rope_side_by_side_come_half_a_part_apart(checkpoint, interleaved):
    folder, stored = checkpoint("deepseek-v3", rope_interleave=interleaved), raw("deepseek-v3")
    order = [0, 2, 4, 6, 1, 3, 5, 7] if interleaved else list(range(8))
    q = ours(folder, "q_up", 0, (4 * 20, 24))
    for head in range(4):  # 12 rows without position, then 8 with
        rows = stored["self_attn.q_b_proj.weight"][20 * head : 20 * head + 20]
        assert q[20 * head : 20 * head + 20].tolist() == np.concatenate([rows[:12], rows[12:][order]]).tolist()
    rows = stored["self_attn.kv_a_proj_with_mqa.weight"]
    assert ours(folder, "kv_down", 0, (24, 32)).tolist() == np.concatenate([rows[:16], rows[16:][order]]).tolist()
    assert ours(folder, "kv_expand", 0, (96, 16)).tolist() == stored["self_attn.kv_b_proj.weight"].tolist()
    expert = stored["model.layers.1.mlp.experts.2.gate_proj.weight"]
    assert ours(folder, "gate_proj", 1, (24, 32), 2).tolist() == expert.tolist()


def test_queries_of_a_latent_without_a_rank_of_their_own(checkpoint):
    def direct(tensors):
        for layer in (0, 1):
            start = f"model.layers.{layer}.self_attn."
            down = [tensors.pop(f"{start}{name}.weight")[1] for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")][0]
            tensors[f"{start}q_proj.weight"] = "F32", np.concatenate([down] * 4)[:80]

    folder = checkpoint("deepseek-v3", direct, q_lora_rank=None)
    # A key taken away is one left out; null says that there is none.
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"q_lora_rank": None}))
    stored = tensors_of(folder)["model.layers.0.self_attn.q_proj.weight"][1]
    assert ours(folder, "q_proj", 0, (80, 32))[12:20].tolist() == stored[12:20][[0, 2, 4, 6, 1, 3, 5, 7]].tolist()


# ---- other families: what is ignored


@pytest.mark.parametrize("case, prefix", [("gpt2", "transformer."), ("gemma2", "model."), ("olmo2", "model.")])
def test_names_may_lack_the_prefix(checkpoint, case, prefix):
    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix(prefix)] = tensors.pop(name)

    name, layer, shape = "down_proj", 1, (32, 128 if case == "gpt2" else 80)
    assert ours(checkpoint(case, strip), name, layer, shape).tolist() == ours(GOLDEN / case, name, layer, shape).tolist()


@pytest.mark.parametrize("start", ["", "transformer."])
def test_masks_that_gpt2_stores_are_ignored(checkpoint, start):
    def add(tensors):
        for name in list(tensors):
            tensors[start + name.removeprefix("transformer.")] = tensors.pop(name)
        tensors[f"{start}h.0.attn.bias"] = "F32", np.ones((1, 1, 128, 128), np.float32)
        tensors[f"{start}h.1.attn.masked_bias"] = "F32", np.float32(-1e4)

    read_checkpoint(checkpoint("gpt2", add))


def test_a_layer_that_predicts_a_second_token_is_ignored(checkpoint):
    def add(tensors):
        for name in ("eh_proj", "enorm", "embed_tokens", "self_attn.q_a_proj"):
            tensors[f"model.layers.2.{name}.weight"] = "F32", np.ones(3, np.float32)

    assert read_checkpoint(checkpoint("deepseek-v3", add)).config.n_layers == 2


def test_it_is_not_ignored_if_it_is_an_ordinary_layer(checkpoint):
    refused(checkpoint("deepseek-v3", num_hidden_layers=1), r"tensors have no place in the config, first 'model\.layers\.1\.")


@pytest.mark.parametrize("case, keys, match", [
    ("qwen3-moe", {"num_local_experts": 4}, r"3 tensors have no place.*mlp\.experts\.4\.down_proj"),
    ("mixtral-moe", {"num_local_experts": 5}, r"6 tensors of the config are missing, first .*experts\.4\.w1"),
    ("qwen3-moe", {"mlp_only_layers": []}, r"missing, first 'model\.layers\.0\.mlp\.experts\.0"),
    ("qwen3-moe", {"moe_intermediate_size": 25}, r"experts\.0\.\w+_proj\.weight is \(.*, expected \((25, 32|32, 25)\)"),
    ("gpt-oss", {"intermediate_size": 79}, r"experts\.\w+ is \(4, .*, expected \(4, .*(79|158)"),
    ("phi3-fused", {"num_key_value_heads": 2}, r"qkv_proj\.weight is \(96, 32\), expected \(64, 32\)"),
    ("gpt2", {"n_positions": 129}, r"transformer\.wpe\.weight is \(128, 32\), expected \(129, 32\)"),
    ("gpt2", {"n_inner": 64}, r"mlp\.c_\w+\.weight is \(.*, expected \((32, 64|64, 32)\)"),
    ("deepseek-v3", {"kv_lora_rank": 15}, r"self_attn\.kv_\w+\.weight is \(.*, expected \(.*(15|23)"),
    ("deepseek-v3", {"n_shared_experts": 2}, r"shared_experts\.\w+\.weight is \(.*, expected \(.*48"),
    ("gemma3", {"head_dim": 8, "query_pre_attn_scalar": 16}, r"self_attn\.\w+\.weight is \(.*, expected \((8,|32, 32|16, 32)"),
])  # fmt: skip
def test_configs_that_the_tensors_contradict(checkpoint, case, keys, match):
    refused(checkpoint(case, **keys), match)


CASES = sorted(path.name for path in GOLDEN.iterdir())
SIZES = sorted({key for case in CASES for key, value in json.loads((GOLDEN / case / "config.json").read_text()).items()
                if type(value) in (int, bool)})  # fmt: skip


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=st.sampled_from(CASES),
    keys=st.dictionaries(st.sampled_from(SIZES), st.integers(0, 100) | st.booleans() | st.just(2**31), max_size=3),
)
def test_any_sizes_in_the_config_are_read_or_refused(tmp_path, case, keys):
    for path in (GOLDEN / case).iterdir():
        if not (tmp_path / case / path.name).exists():
            (tmp_path / case).mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / case)
    config = json.loads((GOLDEN / case / "config.json").read_text())
    (tmp_path / case / "config.json").write_text(json.dumps(config | keys))
    try:
        assert read_checkpoint(tmp_path / case).config.n_layers == config.get("num_hidden_layers", config.get("n_layer"))
    except (CheckpointError, ConfigError) as error:
        assert str(error).startswith(str(tmp_path)) and "\n" not in str(error)
