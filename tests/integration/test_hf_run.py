"""From a Hugging Face folder and a file of prompts to a Hugging Face folder."""
import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_longstraw import train
from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.convert.errors import FolderError
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.checkpoint import save_weights
from megatron_longstraw.mcore.hf_weights import load_hf
from megatron_longstraw.mcore.model import build_model_chunks
from tests.hf_models import adopt, make_whole_folder


def reward(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model folder with a tokenizer of its own, and prompts."""
    folder = tmp_path_factory.mktemp("hf") / "model"
    make_whole_folder(folder)
    rows = [{"prompt": f"the cat number {i} sat on the mat", "answer": str(i)} for i in range(4)]
    (folder.parent / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def options_of(source, run_dir, **options):
    return dict(
        hf_checkpoint=str(source),
        train_files=(str(source.parent / "prompts.jsonl"),),
        reward_function=f"{__name__}:reward",
        run_dir=str(run_dir),
        group_size=4,
        train_batch_size=2,
        max_response_length=6,
        train_iters=2,
        lr=1e-3,
        seed=5,
    ) | options


def metrics(run_dir):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.startswith(("timing", "perf"))} for line in lines]


def test_a_run_leaves_a_folder_that_transformers_loads(source, tmp_path, capsys):
    import transformers

    train.run(load_config(overrides=options_of(source, tmp_path / "run", save_hf=str(tmp_path / "trained"))))
    assert str(tmp_path / "trained") in capsys.readouterr().out
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "trained"))
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before), "every tensor was trained"
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            assert path.read_bytes() == (tmp_path / "trained" / path.name).read_bytes()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "trained")
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([tokenizer("the cat").input_ids])).logits).all()


def test_both_ways_in_are_one(source, tmp_path):
    """--load of an imported checkpoint trains as --hf-checkpoint does, to the last bit."""
    config, folder = adopt(source)
    parallel.initialize(config)
    chunks = build_model_chunks(config)
    load_hf(chunks, config.model, folder)
    save_weights(chunks, tmp_path / "megatron", "")
    train.run(load_config(overrides=options_of(source, tmp_path / "direct")))
    train.run(load_config(overrides=options_of(source, tmp_path / "loaded", load=str(tmp_path / "megatron"))))
    train.run(load_config(overrides=options_of(source, tmp_path / "other", seed=6)))
    assert metrics(tmp_path / "direct") == metrics(tmp_path / "loaded") != metrics(tmp_path / "other")


WRONG = [
    (dict(hf_checkpoint="nowhere"), FolderError, "no such folder"),
    (dict(hidden_size=128), ConfigError, "--hidden-size"),
    (dict(save_hf="{run}"), FolderError, "exists already"),
    (dict(load="nowhere"), ConfigError, "change --load"),
    (dict(hf_checkpoint=None, save_hf="x"), ConfigError, "--hf-checkpoint"),
]


@pytest.mark.parametrize(("options", "kind", "words"), WRONG, ids=[words for *_, words in WRONG])
def test_wrong_places_are_named_before_training(options, kind, words, source, tmp_path):
    options = {name: str(source) if value == "{run}" else value for name, value in options.items()}
    with pytest.raises(kind, match=words):
        train.run(load_config(overrides=options_of(source, tmp_path / "run", **options)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
