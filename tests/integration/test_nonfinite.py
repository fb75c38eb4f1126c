"""A step that is not finite when training stops for it: what is kept, and that it can be run again."""
import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from megatron_longstraw import train
from megatron_longstraw.config import load_config
from megatron_longstraw.data.rollout_files import RolloutReader
from tests.helpers import TINY, random_groups
from tests.hf_models import make_folder

ROOT = Path(__file__).parents[2]
BATCH = 2


class Prompts:
    def prompts(self, step, num_prompts):
        groups = random_groups(num_prompts, [30, 20], [], seed=step)
        for group in groups:
            group.extra_info = {"step": step}
        return groups

    def render(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)


def task(config):
    return Prompts()


def reward(data_source, solution_str, ground_truth, extra_info):
    """From step 2 on some rewards are so large that a token's weight overflows float32."""
    huge = 1e100 if extra_info["step"] >= 2 else 1.0
    return huge * (solution_str.count("a") + 0.1 * solution_str.count("b"))


def run(folder, **options):
    """The message that the run stops with, and its metrics."""
    own = dict(
        prompt_function=f"{__name__}:task", reward_function=f"{__name__}:reward", run_dir=str(folder / "run"), train_iters=9,
        train_batch_size=BATCH,
    )  # fmt: skip
    with pytest.raises(train.TrainingStopped) as error:
        train.run(load_config(overrides=TINY | own | options))
    return str(error.value), metrics_of(folder / "run")


def metrics_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kept(folder):
    return json.loads((folder / "report.json").read_text())


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_step_that_training_stops_at_can_be_run_again(tmp_path, monkeypatch):
    """Steps 0 and 1 train and are saved; 2 and 3 are not finite, the second of them is the last straw."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, Path(__file__).parent))))
    options = dict(norm_adv_by_std_in_grpo=False, max_consecutive_nonfinite_steps=2, lr_decay_style="linear", lr_warmup_iters=2)
    message, metrics = run(tmp_path, **options, save=str(tmp_path / "save"), save_interval=2)
    folder = tmp_path / "run" / "nonfinite_step_000003"
    assert "2 times in a row" in message and str(folder) in message and "replay.sh" in message
    assert [row["training/updates"] for row in metrics] == [1, 1, 0, 0]

    found = kept(folder)
    assert (found["step"], found["update"], found["updates_since_checkpoint"]) == (3, 0, 0)
    assert found["checkpoint"] == str(tmp_path / "save" / "iter_0000002")
    assert "embedding.word_embeddings.weight" in found["gradients"] and "decoder.layers.1.mlp.linear_fc2.weight" in found["gradients"]
    assert found["tables"] and all(line.startswith("token weights of group ") for line in found["tables"])

    whole = rows_of(tmp_path / "run" / "rollouts.jsonl")
    assert rows_of(folder / "rollouts.jsonl") == [row | {"step": 0} for row in whole if row["step"] == 3]
    groups = RolloutReader(folder / "rollouts.jsonl", 2**20).prompts(0, BATCH)
    assert all(len(group.branches) == TINY["group_size"] for group in groups)
    assert max(branch.reward for group in groups for branch in group.branches) > 1e99

    monkeypatch.delenv("PYTHONPATH")  # the script knows it
    done = subprocess.run(["bash", folder / "replay.sh"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 1 and "step 0: loss or gradient is not finite" in done.stderr, done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    again = kept(folder / "replay" / "nonfinite_step_000000")
    assert (again["gradients"], again["tables"]) == (found["gradients"], found["tables"])
    (row,) = metrics_of(folder / "replay")
    for name in ("actor/pg_loss", "actor/entropy", "critic/score/mean", "prompt_length/mean"):
        assert row[name] == metrics[3][name], name
    assert sorted(path.name for path in (tmp_path / "save").glob("iter_*")) == ["iter_0000002"], "the run's own are left alone"


def test_without_a_checkpoint_it_says_how_old_the_weights_are(tmp_path):
    message, metrics = run(tmp_path, norm_adv_by_std_in_grpo=False, nonfinite_policy="stop", ppo_epochs=2)
    assert "--nonfinite-policy stop" in message and len(metrics) == 3
    folder = tmp_path / "run" / "nonfinite_step_000002"
    found = kept(folder)
    assert (found["checkpoint"], found["updates_since_checkpoint"], found["update"]) == (None, 4, 1)
    assert "Weights: those that the configuration begins with; the run made 4 updates since." in (folder / "replay.sh").read_text()


def overflowing(folder):
    """A model whose second MLP adds nothing, by numbers so large that the gradient of its first matrix overflows."""
    make_folder("llama tied", folder, num_hidden_layers=2)
    tensors = load_file(folder / "model.safetensors")
    layer = "model.layers.1."
    tensors[layer + "mlp.up_proj.weight"].zero_()
    tensors[layer + "mlp.down_proj.weight"].fill_(3e38)
    tensors[layer + "post_attention_layernorm.weight"].fill_(1e6)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_the_gradients_that_overflow_are_named(tmp_path):
    """Sampling and log-probs are fine; the gradient is lost from the overflow on, and right above it."""
    options = {name: value for name, value in TINY.items() if name in ("max_response_length", "group_size", "prefix_chunk_tokens")}
    config = load_config(
        overrides=options
        | dict(
            hf_checkpoint=str(overflowing(tmp_path / "model")), prompt_function=f"{__name__}:task", train_iters=2,
            reward_function=f"{__name__}:reward", run_dir=str(tmp_path / "run"), train_batch_size=BATCH, nonfinite_policy="stop",
        )
    )  # fmt: skip
    with pytest.raises(train.TrainingStopped, match="nonfinite_step_000000"):
        train.run(config)
    found = kept(tmp_path / "run" / "nonfinite_step_000000")
    assert found["tables"] == []
    assert "decoder.layers.1.mlp.linear_fc1.weight" in found["gradients"] and "decoder.layers.0.mlp.linear_fc2.weight" in found["gradients"]
    assert not {"decoder.layers.1.mlp.linear_fc2.weight", "decoder.final_layernorm.weight"} & set(found["gradients"])


def test_a_folder_that_cannot_be_written_does_not_hide_the_reason(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "nonfinite_step_000002").write_text("in the way")
    message, _ = run(tmp_path, norm_adv_by_std_in_grpo=False, nonfinite_policy="stop")
    assert "not finite" in message and "the step could not be kept in" in message and "File exists" in message
