"""A run on prompts from files: the row reaches the reward function, and the run folder says what was used."""
import json
import tomllib

from megatron_longstraw import train
from megatron_longstraw.config import load_config
from tests import tiny_tokenizers
from tests.helpers import TINY

SEEN = []


def reward(data_source, solution_str, ground_truth, extra_info):
    SEEN.append((data_source, ground_truth, extra_info["index"]))
    assert isinstance(solution_str, str)
    return float(len(solution_str) % 3)


def test_a_run_on_files(tmp_path, capsys):
    source = {"data_source": "d", "prompt": "the cat"}
    rows = [source | {"reward_model": {"ground_truth": i}, "extra_info": {"index": i}} for i in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tiny_tokenizers.byte_level(tmp_path / "tokenizer")
    options = {"train_files": (str(tmp_path / "prompts.jsonl"),), "tokenizer_model": str(folder), "vocab_size": 320}
    options |= {"reward_function": f"{__name__}:reward", "train_iters": 2, "run_dir": str(tmp_path / "run")}
    train.run(load_config(overrides=TINY | options))
    assert set(SEEN) == {("d", i, i) for i in range(4)}  # two steps of two prompts are an epoch
    assert "4 rows of 1 file\n" in capsys.readouterr().out
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["rollout"]["stop_token_ids"] == [1]
