"""tools/convert_hf.py as a user runs it."""
import filecmp
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_longstraw.mcore.checkpoint_folder import RELEASE, TRACKER
from tests.hf_models import make_folder

ROOT = Path(__file__).parents[2]
TOOL = str(ROOT / "tools/convert_hf.py")


def command(*arguments, ranks=1):
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [sys.executable, "-W", "ignore", *launcher, TOOL, *map(str, arguments)]


def run(*arguments, ranks=1):
    return subprocess.run(command(*arguments, ranks=ranks), capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder("qwen2 tied", tmp_path_factory.mktemp("hf") / "model", torch.bfloat16)


def test_import_and_export_are_inverse(folder, tmp_path):
    done = run("import", "--hf", folder, "--save", tmp_path / "megatron")
    assert done.returncode == 0, done.stderr
    assert "bfloat16" in done.stdout
    assert (tmp_path / "megatron" / TRACKER).read_text() == RELEASE
    done = run("export", "--load", tmp_path / "megatron", "--hf-origin", folder, "--save", tmp_path / "export")
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "export").iterdir())
    assert all(filecmp.cmp(folder / name, tmp_path / "export" / name, shallow=False) for name in names)

    for again in (
        run("import", "--hf", folder, "--save", tmp_path / "megatron"),
        run("export", "--load", tmp_path / "megatron", "--hf-origin", folder, "--save", tmp_path / "export"),
    ):
        assert again.returncode == 1 and "nothing is overwritten" in again.stderr and "Traceback" not in again.stderr


@pytest.mark.parametrize("layout", [(), ("--tensor-model-parallel-size", 2)], ids=["1 rank", "tp2"])
def test_verify_prints_its_two_numbers(folder, layout):
    done = run("verify", "--hf", folder, "--json", *layout, ranks=2 if layout else 1)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["max_logit_diff"] <= 1e-4 and result["roundtrip_bit_equal"] is True


def test_verify_of_another_models_checkpoint_fails(folder, tmp_path):
    other = make_folder("qwen2 tied", tmp_path / "other", torch.bfloat16)
    from safetensors.torch import load_file

    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] += 1.0
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    assert run("import", "--hf", other, "--save", tmp_path / "megatron").returncode == 0
    done = run("verify", "--hf", folder, "--load", tmp_path / "megatron", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 1 and result["max_logit_diff"] > 0.1 and not result["roundtrip_bit_equal"]
    assert result["differing_files"] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["import", "--hf", "nowhere", "--save", "x"], ["nowhere", "no such folder"]),
        (["import", "--save", "x"], ["import needs --hf"]),
        (["export", "--hf-origin", "nowhere"], ["export needs --save", "export needs --load"]),
        (["verify", "--hf", "nowhere", "--tensr-model-parallel-size", "2"], ["--tensor-model-parallel-size"]),
    ],
)
def test_wrong_arguments_are_named(arguments, words):
    done = run(*arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words)


def test_a_partial_checkpoint_is_refused_or_filled_up(folder, tmp_path):
    """G14"""
    untied = make_folder("llama llama3", tmp_path / "untied")
    tied = make_folder("llama tied", tmp_path / "tied")
    assert run("import", "--hf", tied, "--save", tmp_path / "megatron").returncode == 0
    arguments = ("export", "--load", tmp_path / "megatron", "--hf-origin", untied, "--save", tmp_path / "export")
    done = run(*arguments)
    assert done.returncode == 1 and "has no output_layer.weight" in done.stderr and not (tmp_path / "export").exists()
    done = run(*arguments, "--backfill")
    assert done.returncode == 0 and "output_layer.weight: not in the checkpoint" in done.stdout
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(exported["lm_head.weight"], load_file(untied / "model.safetensors")["lm_head.weight"])
    assert torch.equal(exported["model.norm.weight"], load_file(tied / "model.safetensors")["model.norm.weight"])


def random_folder(folder, num_layers):
    """bfloat16 weights of 25 MB a layer and 131 MB besides; returns their bytes."""
    hidden, ffn, vocab, heads, groups = 1024, 3072, 32000, 16, 4
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    rows = hidden // heads * groups
    tensors = {"model.embed_tokens.weight": random(vocab, hidden), "lm_head.weight": random(vocab, hidden)}
    tensors["model.norm.weight"] = random(hidden)
    for layer in range(num_layers):
        tensors |= {
            f"model.layers.{layer}.{name}": random(*shape)
            for name, shape in {
                "input_layernorm.weight": (hidden,),
                "post_attention_layernorm.weight": (hidden,),
                "self_attn.q_proj.weight": (hidden, hidden),
                "self_attn.k_proj.weight": (rows, hidden),
                "self_attn.v_proj.weight": (rows, hidden),
                "self_attn.o_proj.weight": (hidden, hidden),
                "mlp.gate_proj.weight": (ffn, hidden),
                "mlp.up_proj.weight": (ffn, hidden),
                "mlp.down_proj.weight": (hidden, ffn),
            }.items()
        }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = dict(
        model_type="llama",
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocab,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_position_embeddings=2048,
    )
    (folder / "config.json").write_text(json.dumps(config))
    return sum(tensor.numel() * 2 for tensor in tensors.values())


def peak_anonymous_bytes(arguments):
    """Largest memory of a process that is not a mapped file, sampled every few milliseconds."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    peak = 0

    def watch():
        nonlocal peak
        while process.poll() is None:
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            peak = max([peak, *(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon"))])
            time.sleep(0.005)

    thread = threading.Thread(target=watch)
    thread.start()
    errors = process.communicate()[1]
    thread.join()
    assert process.returncode == 0, errors
    return peak


@pytest.mark.parametrize("num_layers", [12, pytest.param(42, marks=pytest.mark.slow)], ids=["0.4 GB", "1 GB"])
def test_conversion_needs_little_more_memory_than_the_weights(num_layers, tmp_path):
    weight_bytes = random_folder(tmp_path / "source", num_layers)
    imports = "import sys; sys.path[:0] = [{!r}, {!r}]; import convert_hf; from megatron_longstraw import config; {}".format(
        str(ROOT), str(ROOT / "tools"), "convert_hf.parallel.initialize(config.load_config().resolve())"
    )
    baseline = peak_anonymous_bytes([sys.executable, "-W", "ignore", "-c", imports])
    source, megatron, export = (tmp_path / name for name in ("source", "megatron", "export"))
    shares = {}
    for name, arguments in {
        "import": ("import", "--hf", source, "--save", megatron),
        "export": ("export", "--load", megatron, "--hf-origin", source, "--save", export),
    }.items():
        shares[name] = (peak_anonymous_bytes(command(*arguments)) - baseline) / weight_bytes
    print({name: round(share, 3) for name, share in shares.items()}, f"of {weight_bytes / 1e9:.2f} GB")
    assert max(shares.values()) <= 1.3
    assert filecmp.cmp(source / "model.safetensors", export / "model.safetensors", shallow=False)
