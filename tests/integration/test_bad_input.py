"""What a user can get wrong ends in one message with the value, what is needed and the flag, before anything runs."""
import json

import numpy as np
import pytest

from megatron_longstraw import Branch, BranchReplay, PromptGroup, load_config, train
from megatron_longstraw.config import ConfigError, parse_args
from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.run_log import RunLog
from tests.helpers import TINY


class Prompts:
    """A task of fixed prompts; `bad` says what is wrong with one of them."""

    def __init__(self, ids=None):
        self.ids = np.arange(20) if ids is None else ids

    def prompts(self, step, num_prompts):
        return [PromptGroup(self.ids, group_id=f"{step}-{number}") for number in range(num_prompts)]

    def render(self, ids):
        return " ".join(map(str, ids))


def fine(config):
    return Prompts()


def outside_vocabulary(config):
    return Prompts(np.array([3, 60, 5]))


def empty_prompt(config):
    return Prompts([])


def reward(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)


RUN = {"prompt_function": f"{__name__}:fine", "reward_function": f"{__name__}:reward", **TINY}
FLAGS = [
    (["--group-size", "0"], ["--group-size", "0"]),
    (["--contxt-parallel-size", "2"], ["--context-parallel-size"]),
    (["--tensor-model-parallel-size", "3"], ["num_attention_heads 4", "--tensor-model-parallel-size"]),
    (["--context-parallel-size", "2"], ["context 2", "a world of 1", "--context-parallel-size"]),
    (["--prompt-function", f"{__name__}:outside_vocabulary"], ["id 60", "position 1", "--vocab-size"]),
    (["--prompt-function", f"{__name__}:empty_prompt"], ["empty"]),
    (["--max-prompt-length", "10"], ["20 tokens", "--max-prompt-length"]),
    (["--reward-function", "no_such_module:score"], ["no_such_module", "--reward-function"]),
    (["--reward-function", f"{__name__}:no_such_function"], ["no_such_function", "--reward-function"]),
    (["--prompt-function", "none"], ["--train-files", "--prompt-function"]),
    (["--train-files", "prompts.jsonl"], ["--train-files prompts.jsonl", "--prompt-function"]),
    (["--hidden-dropout", "0.1"], ["--hidden-dropout"]),
    (["--clip-ratio-high", "1.28"], ["1.28", "--clip-ratio-high"]),
    (["--fp8-prefix", "blockwise", "--fp8-backend", "te"], ["Transformer Engine", "--fp8-backend"]),
]


@pytest.mark.parametrize("flags, words", FLAGS, ids=[" ".join(flags)[:40] for flags, _ in FLAGS])
def test_wrong_input_is_named_before_anything_is_written(flags, words, tmp_path):
    typed = {f"--{name.replace('_', '-')}": str(value) for name, value in RUN.items()}
    argv = [text for pair in typed.items() for text in pair] + ["--run-dir", str(tmp_path / "run"), *flags]
    with pytest.raises(ValueError) as error:
        train.run(parse_args(argv))
    for word in words:
        assert word in str(error.value)
    assert not (tmp_path / "run").exists()


API = [
    (PromptGroup([1, 2]), "group of size 0"),
    (PromptGroup([1, 2], [Branch([3, 61])]), "--vocab-size"),
    (PromptGroup([1, -2], [Branch([3])]), "id -2 at position 1"),
    (PromptGroup([1, 2], [Branch(np.zeros(9, dtype=int))]), "--max-response-length"),
]


@pytest.mark.parametrize("group, words", API, ids=[words for _, words in API])
def test_wrong_groups_are_refused(group, words):
    trainer = BranchReplay(load_config(overrides=TINY))
    with pytest.raises(ConfigError, match=words):
        trainer.gradients([group])


def poisoned_run(tmp_path, **options):
    config = load_config(overrides=RUN | {"train_iters": 10, "run_dir": str(tmp_path)} | options).resolve()
    policy = Policy(config, parallel.initialize(config))
    next(policy.chunks[0].parameters()).register_hook(lambda grad: grad * float("nan"))
    log = RunLog(config, active=True)
    try:
        with pytest.raises(train.TrainingStopped) as error:
            train.train(policy, Prompts(), log)
    finally:
        log.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    return str(error.value), lines


def test_nonfinite_updates_are_counted_and_stop_after_a_row_of_them(tmp_path):
    message, lines = poisoned_run(tmp_path, max_consecutive_nonfinite_steps=3)
    assert "3 times in a row" in message and "--max-consecutive-nonfinite-steps" in message
    assert [line["training/nonfinite_steps"] for line in lines] == [1.0, 1.0, 1.0]
    assert [line["training/updates"] for line in lines] == [0.0, 0.0, 0.0]


def test_nonfinite_updates_stop_at_once_when_asked(tmp_path):
    message, lines = poisoned_run(tmp_path, nonfinite_policy="stop")
    assert "--nonfinite-policy stop" in message and len(lines) == 1
