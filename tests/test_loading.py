"""A checkpoint is mapped and not held twice: the peak of a process that loads and runs one."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import npinfer
from npinfer import ModelConfig
from npinfer.tensors import layer_tensors, model_tensors

SIZES = dict(n_layers=8, d_model=512, n_heads=8, d_ff=1408, vocab_size=4000)
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "hidden_size": 512,
    "num_attention_heads": 8, "intermediate_size": 1408, "vocab_size": 4000, "rms_norm_eps": 1e-5,
}  # fmt: skip
PROGRAM = """
import sys, npinfer, npinfer.checkpoint
from costmodel.report import _peak_memory_bytes
before = _peak_memory_bytes()
model = npinfer.Transformer.from_checkpoint(sys.argv[1], pack=sys.argv[2] == "pack")
model.prefill([1, 2, 3], model.new_cache())
print(_peak_memory_bytes() - before)
"""


def write(folder, dtype):
    """A llama checkpoint with ones in every tensor; gives the bytes of its weights in float32."""
    from npinfer.families import FAMILIES
    from npinfer.layouts import Layout

    config = ModelConfig(**SIZES)
    kinds = {kind: layer_tensors(config, kind) for kind in set(config.kinds)}
    shapes = Layout(FAMILIES["llama"], config, model_tensors(config), kinds).expected()
    one = {"F32": np.ones(1, "<f4"), "BF16": np.array([0x3F80], "<u2")}[dtype]
    header, at = {}, 0
    for name, shape in shapes.items():
        n_bytes = int(np.prod(shape)) * one.itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        np.full(at // one.itemsize, one[0]).tofile(file)
    return at // one.itemsize * 4


@pytest.mark.skipif(sys.platform != "linux", reason="where mapped pages can be given back, and KiB are counted")
@pytest.mark.parametrize("dtype, how, most", [("F32", "wide", 1.4), ("BF16", "wide", 1.4), ("BF16", "pack", 0.9)])
def test_weights_are_not_held_twice(tmp_path, dtype, how, most):
    """A fifth or so is BLAS and the run; with the pages that had been copied it was half as much again."""
    float32_bytes = write(tmp_path, dtype)
    environment = os.environ | {"PYTHONPATH": str(Path(npinfer.__file__).parent.parent)}
    command = [sys.executable, "-c", PROGRAM, tmp_path, how]
    peak = int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert 0.3 < peak / float32_bytes < most
