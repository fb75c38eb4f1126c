"""Damaged model folders: every one is refused with a message that names what is wrong, none half-loaded."""
import json
import random
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_longstraw.config import ConfigError
from megatron_longstraw.convert.errors import FolderError
from megatron_longstraw.convert.safetensors_files import INDEX, SINGLE
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.hf_weights import load_hf
from megatron_longstraw.mcore.model import build_model_chunks
from tests.hf_models import adopt, make_folder

ROOT = Path(__file__).parents[2]
SHARDS = "model-{:05}-of-00003.safetensors"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return make_folder("qwen3", tmp_path_factory.mktemp("single") / "model")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, single):
    """The same tensors in three shards with an index."""
    folder = tmp_path_factory.mktemp("sharded") / "model"
    shutil.copytree(single, folder)
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    weight_map = {}
    for number in range(3):
        part = {name: tensors[name] for name in sorted(tensors)[number::3]}
        save_file(part, folder / SHARDS.format(number + 1))
        weight_map |= dict.fromkeys(part, SHARDS.format(number + 1))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def chunks(single):
    config, _ = adopt(single)
    parallel.initialize(config)
    return build_model_chunks(config)


def load(folder, chunks):
    config, source = adopt(folder)
    load_hf(chunks, config.model, source)


def test_the_undamaged_folders_load(single, sharded, chunks):
    load(single, chunks)
    load(sharded, chunks)


def file_bytes(change):
    """A damage to the only weights file: bytes -> bytes."""

    def damage(folder):
        path = folder / SINGLE
        path.write_bytes(change(path.read_bytes()))

    return damage


def header(change):
    """A damage to its header, as a table; the bytes of the tensors stay."""

    def damage(data):
        (length,) = struct.unpack("<Q", data[:8])
        table = json.loads(data[8 : 8 + length])
        text = change(table)
        text = (text if isinstance(text, str) else json.dumps(table)).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return file_bytes(damage)


def index(change):
    def damage(folder):
        values = json.loads((folder / INDEX).read_text())
        result = change(values["weight_map"], values)
        (folder / INDEX).write_text(json.dumps(values) if result is None else result)

    return damage


def tensors(change):
    def damage(folder):
        values = load_file(folder / SINGLE)
        change(values)
        save_file(values, folder / SINGLE)

    return damage


def config(**changes):
    def damage(folder):
        values = json.loads((folder / "config.json").read_text()) | changes
        values = {name: value for name, value in values.items() if value != "delete"}
        (folder / "config.json").write_text(json.dumps(values))

    return damage


def raw_config(data):
    return lambda folder: (folder / "config.json").write_bytes(data)


FIRST, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"


def flipped(seed):
    """One byte of the header changed, where it means something."""

    def change(data):
        rng = random.Random(seed)
        (length,) = struct.unpack("<Q", data[:8])
        text = data[8 : 8 + length]
        skip = text.index(b'"__metadata__"'), text.index(b"}", text.index(b'"__metadata__"')) + 1
        places = [i for i in range(len(text.rstrip())) if not skip[0] <= i < skip[1]]
        place = rng.choice(places)
        other = bytes([text[place] ^ (1 << rng.randrange(7))])
        if other == b" " or (other.isspace() and text[place : place + 1].isspace()):
            other = b"@"
        return data[: 8 + place] + other + data[8 + place + 1 :]

    return file_bytes(change)


def set_in(name, key, value):
    def change(table):
        table[name][key] = value

    return header(change)


SINGLE_DAMAGES = {
    **{f"cut at {share}/20": file_bytes(lambda d, s=share: d[: len(d) * s // 20]) for share in range(20)},
    **{f"header byte {seed}": flipped(seed) for seed in range(40)},
    "last byte missing": file_bytes(lambda data: data[:-1]),
    "bytes appended": file_bytes(lambda data: data + b"\0" * 7),
    "header length zero": file_bytes(lambda data: b"\0" * 8 + data[8:]),
    "header length huge": file_bytes(lambda data: b"\xff" * 8 + data[8:]),
    "a pickle": file_bytes(lambda data: b"\x80\x04" + data),
    "header a list": header(lambda table: "[]"),
    "header empty": header(lambda table: "{}"),
    "a tensor twice": header(lambda table: json.dumps(table)[:-1] + f', "{NORM}": {json.dumps(table[NORM])}}}'),
    "deep header": header(lambda table: "[" * 100000 + "]" * 100000),
    "unknown dtype": set_in(NORM, "dtype", "F31"),
    "integer weights": tensors(lambda t: t.update({NORM: t[NORM].to(torch.int32)})),
    "boolean weights": tensors(lambda t: t.update({FIRST: t[FIRST] > 0})),
    "negative shape": set_in(NORM, "shape", [-64]),
    "fractional shape": set_in(NORM, "shape", [64.0]),
    "true as shape": set_in(NORM, "shape", [True]),
    "shape null": set_in(NORM, "shape", None),
    "offsets swapped": header(lambda t: t[NORM]["data_offsets"].reverse()),
    "offsets of another": header(lambda t: t[NORM].update(data_offsets=t["model.layers.0.input_layernorm.weight"]["data_offsets"])),
    "offsets beyond": set_in(NORM, "data_offsets", [2**60, 2**60 + 256]),
    "three offsets": set_in(NORM, "data_offsets", [0, 1, 2]),
    "a tensor of text": header(lambda t: t.update({NORM: "weights"})),
    "missing norm": tensors(lambda t: t.pop(NORM)),
    "missing layer": tensors(lambda t: [t.pop(name) for name in list(t) if ".layers.3." in name]),
    "missing head": tensors(lambda t: t.pop("lm_head.weight")),
    "missing key projection": tensors(lambda t: t.pop("model.layers.1.self_attn.k_proj.weight")),
    "one layer too many": tensors(lambda t: t.update({FIRST.replace("0", "4"): t[FIRST].clone()})),
    "misspelt tensor": tensors(lambda t: t.update({"model.norm.wieght": t.pop(NORM)})),
    "bias nobody has": tensors(lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(128)})),
    "transposed": tensors(lambda t: t.update({FIRST: t[FIRST].t().contiguous()})),
    "flattened": tensors(lambda t: t.update({FIRST: t[FIRST].reshape(-1)})),
    "vocabulary short": tensors(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:-1].clone()})),
    "scalar": tensors(lambda t: t.update({NORM: torch.tensor(1.0)})),
    **{
        f"{word} in {name}": tensors(lambda t, n=name, v=value: t[n].view(-1)[-1:].fill_(v))
        for word, value in (("NaN", float("nan")), ("inf", float("inf")))
        for name in (NORM, FIRST, "lm_head.weight", "model.embed_tokens.weight", "model.layers.2.self_attn.q_norm.weight")
    },
    "opposite infinities": tensors(lambda t: t[NORM][:2].copy_(torch.tensor([float("inf"), -float("inf")]))),
    "no weights": lambda folder: (folder / SINGLE).unlink(),
    "pickled weights": lambda folder: (folder / SINGLE).rename(folder / "pytorch_model.bin"),
    "weights a folder": lambda folder: ((folder / SINGLE).unlink(), (folder / SINGLE).mkdir()),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config not UTF-8": raw_config(b'{"model_type": "\xff"}'),
    "config not JSON": raw_config(b"{model_type: qwen3}"),
    "config a list": raw_config(b"[]"),
    "config empty": raw_config(b""),
    "config deep": raw_config(b"[" * 100000),
    **{
        f"{key} {value!r}": config(**{key: value})
        for key, values in {
            "model_type": ["qwen4", None, 7, "delete", ["qwen3"]],
            "num_hidden_layers": [0, -1, "4", 4.0, None, True, 2**70],
            "hidden_size": [0, None, "64", [64], 128],
            "num_attention_heads": [0, 3, None, {}],
            "num_key_value_heads": [3, 0, "2", 4],
            "head_dim": [0, 31, None, "delete"],
            "vocab_size": [89, 91, 0, None],
            "intermediate_size": [95, None],
            "rms_norm_eps": [0, -1e-6, "1e-6", None, "delete"],
            "tie_word_embeddings": ["yes", 1],
            "hidden_act": ["gelu"],
            "attention_bias": [True],
            "attention_dropout": [0.1],
            "quantization_config": [{"quant_method": "gptq"}],
            "layer_types": [["linear_attention"] * 4],
            "max_position_embeddings": [0, None, "256"],
            "rope_parameters": [
                "delete",
                {"rope_type": "default"},
                {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                {"rope_type": "longrope", "rope_theta": 1e4},
                {"rope_type": "linear", "rope_theta": 1e4},
                {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0},
                {"rope_type": "yarn", "rope_theta": 1e4, "factor": "4"},
                {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False},
                {"rope_type": "mystery", "rope_theta": 1e4},
                {"rope_type": "default", "rope_theta": 0},
                {"rope_type": "default", "rope_theta": "1e4"},
                {"full_attention": {"rope_theta": 1e4}},
                "default",
            ],
        }.items()
        for value in values
    },
}


def misplace(weight_map, values):
    one, other = sorted(weight_map)[:2]
    weight_map[one], weight_map[other] = weight_map[other], weight_map[one]


def stale(folder):
    values = json.loads((folder / INDEX).read_text())
    values["weight_map"] = {name: file.replace("00003", "00002") for name, file in values["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(values))


def second_copy(folder):
    part = load_file(folder / SHARDS.format(1))
    other = load_file(folder / SHARDS.format(2))
    name = next(iter(part))
    save_file(other | {name: part[name]}, folder / SHARDS.format(2))


SHARDED_DAMAGES = {
    "two entries swapped": index(misplace),
    "stale index": stale,
    "no index": lambda folder: (folder / INDEX).unlink(),
    "missing shard": lambda folder: (folder / SHARDS.format(2)).unlink(),
    "empty shard": lambda folder: (folder / SHARDS.format(2)).write_bytes(b""),
    "truncated shard": lambda folder: (folder / SHARDS.format(3)).write_bytes((folder / SHARDS.format(3)).read_bytes()[:-5]),
    "shards exchanged": lambda folder: (
        (folder / SHARDS.format(1)).rename(folder / "x"),
        (folder / SHARDS.format(2)).rename(folder / SHARDS.format(1)),
        (folder / "x").rename(folder / SHARDS.format(2)),
    ),
    "shard of another set": lambda folder: shutil.copy(folder / SHARDS.format(1), folder / "model-00001-of-00009.safetensors"),
    "a tensor in two shards": second_copy,
    "entry missing": index(lambda m, v: m.pop(NORM) and None),
    "entry too many": index(lambda m, v: m.update({"model.extra": SHARDS.format(1)})),
    "file outside the folder": index(lambda m, v: m.update({NORM: "../" + SHARDS.format(1)})),
    "file a number": index(lambda m, v: m.update({NORM: 1})),
    "file null": index(lambda m, v: m.update({NORM: None})),
    "no weight_map": index(lambda m, v: v.pop("weight_map") and None),
    "weight_map a list": index(lambda m, v: v.update(weight_map=[])),
    "weight_map empty": index(lambda m, v: v.update(weight_map={})),
    "index not JSON": index(lambda m, v: "weight_map"),
    "index a list": index(lambda m, v: "[]"),
    "a name twice": index(lambda m, v: '{"weight_map": {"a": "b", "a": "c"}}'),
    "index truncated": lambda folder: (folder / INDEX).write_text((folder / INDEX).read_text()[:-20]),
}
CASES = [("single", name) for name in SINGLE_DAMAGES] + [("sharded", name) for name in SHARDED_DAMAGES]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[name for _, name in CASES])
def test_a_damaged_folder_is_refused_in_words(kind, name, request, tmp_path, chunks):
    """Among them indexes that name the wrong shard (G13), and tensors missing or without a place (G09)."""
    folder = tmp_path / "model"
    shutil.copytree(request.getfixturevalue(kind), folder)
    (SINGLE_DAMAGES if kind == "single" else SHARDED_DAMAGES)[name](folder)
    with pytest.raises((FolderError, ConfigError)) as error:
        load(folder, chunks)
    assert "Traceback" not in str(error.value) and len(str(error.value)) < 8000


WORDS = {
    "two entries swapped": ["lm_head.weight", SHARDS.format(2)],
    "missing norm": [NORM, "missing"],
    "NaN in model.norm.weight": [NORM, SINGLE, "NaN"],
    "transposed": [FIRST, "[64, 96]", "[96, 64]"],
    "stale index": ["00002", "missing"],
    "a tensor in two shards": [SHARDS.format(1), SHARDS.format(2)],
    "cut at 10/20": [SINGLE],
    "model_type 'qwen4'": ["qwen3"],
    "pickled weights": ["safetensors files only", "never unpickled"],
}


@pytest.mark.parametrize("name", WORDS)
def test_the_message_names_tensor_and_file(name, single, sharded, tmp_path, chunks):
    folder = tmp_path / "model"
    shutil.copytree(sharded if name in SHARDED_DAMAGES else single, folder)
    (SINGLE_DAMAGES | SHARDED_DAMAGES)[name](folder)
    with pytest.raises((FolderError, ConfigError)) as error:
        load(folder, chunks)
    for word in WORDS[name]:
        assert word in str(error.value)


def test_the_tool_prints_one_message_and_no_traceback(single, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(single, folder)
    SINGLE_DAMAGES["cut at 10/20"](folder)
    command = [sys.executable, "-W", "ignore", ROOT / "tools/convert_hf.py", "import", "--hf", folder, "--save", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) == 2
    assert not (tmp_path / "out").exists()
