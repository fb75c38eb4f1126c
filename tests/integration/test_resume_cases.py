"""What people have reported about runs that go on: random states, samples and schedules."""
import json
from collections import Counter

import pytest

from megatron_longstraw import train as program
from megatron_longstraw.config import load_config
from tests import tiny_tokenizers
from tests.helpers import TINY
from tests.training_runs import train

UPDATES = 4
STEPS = 3
OPTIONS = dict(
    ppo_epochs=2, ppo_mini_batch_size=1, lr_warmup_iters=UPDATES + 2, lr_decay_style="cosine", train_iters=STEPS
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without a stop, one that stopped after its first step and went on, and one that takes only its weights."""
    save = str(tmp_path_factory.mktemp("runs") / "save")
    straight = train(0, STEPS, OPTIONS)
    train(0, 1, OPTIONS | {"save": save})
    finetuned = train(0, 1, OPTIONS | {"load": save, "finetune": True})
    return straight, train(0, STEPS, OPTIONS | {"save": save}), finetuned


def column(run, name):
    return [row[name] for row in run["history"]]


def test_random_states_after_the_first_resumed_batch(runs):
    """J03: also of Python and NumPy, and nothing but the reward function draws from them."""
    straight, resumed, _ = runs
    states = column(straight, "random_states")
    assert column(resumed, "random_states") == states[1:] and len(set(states)) == STEPS


def test_the_schedule_counts_optimizer_steps(runs):
    """J05"""
    straight, resumed, finetuned = runs
    assert column(straight, "schedule_steps") == [UPDATES, 2 * UPDATES, 3 * UPDATES]
    assert column(resumed, "schedule_steps") == [2 * UPDATES, 3 * UPDATES]
    assert column(finetuned, "schedule_steps") == [UPDATES], "a new optimizer starts at 0"
    assert column(finetuned, "actor/lr") == column(straight, "actor/lr")[:1]
    rates = column(straight, "actor/lr")
    assert rates[1] > rates[2] > 0.0, "the decay lasts as long as the run, whatever the updates in a step"


def test_the_warmup_is_not_run_again(runs):
    """J06: the stop is in the middle of it."""
    straight, resumed, _ = runs
    rates = column(straight, "actor/lr")
    assert column(resumed, "actor/lr") == rates[1:] and rates[0] < TINY["lr"] / 2


def score(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str) % 3)


def test_every_sample_is_trained_once_an_epoch(tmp_path):
    """J04: five rows, two a step; a stop is where the last row of an epoch shares a step with the next one's first."""
    tiny_tokenizers.byte_level(tmp_path / "tokenizer")
    rows = [{"id": f"q{i}", "prompt": "the" * (i + 1), "answer": ""} for i in range(5)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = TINY | dict(
        train_files=(str(tmp_path / "prompts.jsonl"),), tokenizer_model=str(tmp_path / "tokenizer"), vocab_size=512,
        reward_function=f"{__name__}:score", save=str(tmp_path / "save"), run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    for train_iters in (2, 3, 5):
        program.run(load_config(overrides=options | {"train_iters": train_iters}))
    sampled = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    groups = list(dict.fromkeys((row["step"], str(row["group_id"])) for row in sampled))
    assert Counter(step for step, _ in groups) == {step: 2 for step in range(5)}
    names = [next(row["id"] for row in rows if row["id"] in group) for _, group in groups]
    assert sorted(names[:5]) == sorted(names[5:]) == [row["id"] for row in rows]
