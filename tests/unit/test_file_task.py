"""Prompts of files as a task: which rows, which ids, and what is refused before the run."""
import hashlib
import struct
import time

import numpy as np
import orjson
import pytest

from megatron_longstraw.config import ConfigError, load_config
from megatron_longstraw.data.file_task import FileTask, epoch_order, row_id
from megatron_longstraw.data.task import check_prompts
from megatron_longstraw.sources import task_maker, with_stop_ids
from megatron_longstraw.types import Branch, PromptGroup, prompt_digest
from tests import tiny_tokenizers
from tests.tiny_tokenizers import IM_END

NUM_ROWS = 7
ROWS = [
    {
        "id": f"q{i}",
        "prompt": "the" + " the" * i,
        "data_source": "count",
        "reward_model": {"ground_truth": str(i)},
        "extra_info": {"index": i},
    }
    for i in range(NUM_ROWS)
]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    made = {"byte_level": tiny_tokenizers.byte_level(folder / "a"), "spm": tiny_tokenizers.sentence_piece(folder / "b")}
    bare = folder / "tokenizer.json"
    bare.write_bytes((made["byte_level"] / "tokenizer.json").read_bytes())
    return made | {"bare": bare}


@pytest.fixture
def configure(tokenizers, tmp_path):
    def make(rows=ROWS, tokenizer="byte_level", **options):
        path = tmp_path / str(len(list(tmp_path.iterdir()))) / "prompts.jsonl"
        path.parent.mkdir()
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        named = {"train_files": (str(path),), "tokenizer_model": str(tokenizers[tokenizer]), "vocab_size": 512}
        overrides = {name: value for name, value in (named | options).items() if value != ()}
        return load_config(overrides=overrides).resolve()

    return make


@pytest.fixture
def build(configure):
    return lambda *args, **options: FileTask.from_config(configure(*args, **options))


def names(groups):
    return [row_id(group.group_id) for group in groups]


def test_a_group_is_its_row(build):
    task = build(shuffle=False)
    group = task.prompts(0, 2)[1]
    tokenizer = task.tokenizer
    assert group.prompt_ids.tolist() == tokenizer.encode("the the").tolist() and group.prompt_ids.dtype == np.int64
    assert (group.data_source, group.ground_truth, group.extra_info, group.branches) == ("count", "1", {"index": 1}, [])
    assert row_id(group.group_id) == "q1"
    assert task.render(tokenizer.encode("the cat")) == "the cat"


def test_every_epoch_reads_every_row_once_in_its_own_order(build):
    task = build()
    order = [name for step in range(3) for name in names(task.prompts(step, NUM_ROWS))]
    epochs = [order[i : i + NUM_ROWS] for i in range(0, len(order), NUM_ROWS)]
    assert all(sorted(epoch) == [row["id"] for row in ROWS] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    in_twos = [name for step in range(10) for name in names(task.prompts(step, 2))]
    assert in_twos == order[:20]  # steps run over the end of an epoch


def test_a_step_depends_on_its_number_and_the_seed_only(build):
    straight = [build().prompts(step, 3) for step in range(6)]
    late, other = build(), build(seed=5)
    again = late.prompts(5, 3)
    assert [group.group_id for group in again] == [group.group_id for group in straight[5]]
    assert all((a.prompt_ids == b.prompt_ids).all() for a, b in zip(again, straight[5]))
    assert [names(other.prompts(step, 3)) for step in range(6)] != [names(groups) for groups in straight]
    assert epoch_order(1, 2, 9).tolist() == epoch_order(1, 2, 9).tolist() != epoch_order(1, 3, 9).tolist()


def test_group_ids_are_unique_even_for_a_row_that_comes_twice_in_a_step(build):
    task = build(rows=ROWS[:3])
    groups = [group for step in range(4) for group in task.prompts(step, 5)]
    assert len({group.group_id for group in groups}) == 20
    assert len(set(names(task.prompts(1, 5)))) == 3


def test_ids_with_a_colon_and_rows_without_id(build):
    assert names(build(rows=[ROWS[0] | {"id": "a:b"}]).prompts(3, 1)) == ["a:b"]
    task = build(rows=[{"prompt": "the", "answer": 1}] * 3, shuffle=False)
    assert names(task.prompts(0, 3)) == ["1", "2", "3"]


LENGTHS = [{"id": f"p{length}", "prompt_ids": list(range(length)), "answer": length} for length in (7, 8, 9)]


@pytest.mark.parametrize("truncation, third", [("left", list(range(1, 9))), ("right", list(range(8)))])
def test_truncation_keeps_the_last_or_the_first_tokens(build, truncation, third):
    """Field case I09."""
    groups = build(LENGTHS, shuffle=False, max_prompt_length=8, truncation=truncation).prompts(0, 3)
    assert [group.prompt_ids.tolist() for group in groups] == [list(range(7)), list(range(8)), third]


def test_truncation_filter_leaves_rows_out(build):
    task = build(LENGTHS, shuffle=False, max_prompt_length=8, truncation="filter")
    assert [names(task.prompts(step, 1)) for step in range(4)] == [["p7"], ["p8"], ["p7"], ["p8"]]
    assert task.num_left_out == 1 and "1 longer than 8 tokens left out" in task.describe()


def test_truncation_error_names_the_row(build):
    task = build(LENGTHS, shuffle=False, max_prompt_length=8)
    assert len(task.prompts(0, 2)) == 2
    with pytest.raises(ConfigError, match=r"prompts.jsonl: row 3 \(id 'p9'\).* 9 tokens.* 8.*--max-prompt-length"):
        task.prompts(0, 3)


def test_lengths_are_those_of_final_ids(build):
    """Field case I09: the chat template and the BOS count."""
    rows = [{"prompt": "the cat", "answer": 1}]
    plain, chat = build(rows), build(rows, apply_chat_template=True)
    short, long = (len(task.prompts(0, 1)[0].prompt_ids) for task in (plain, chat))
    assert short == 3 and long > short
    with pytest.raises(ConfigError, match="--max-prompt-length"):
        build(rows, apply_chat_template=True, max_prompt_length=long - 1, truncation="filter")
    assert len(build(rows, apply_chat_template=True, max_prompt_length=long, truncation="filter").kept) == 1


def test_truncated_prompt_is_the_prompt(build):
    """Field case I10: one array of ids goes to sampler, trainer and digest."""
    rows = [{"prompt_ids": list(range(12)), "answer": 1}]
    group = build(rows, max_prompt_length=8, truncation="left").prompts(0, 1)[0]
    assert prompt_digest(group.prompt_ids) == prompt_digest(list(range(4, 12))) != prompt_digest(range(12))


def test_prompt_digest():
    ids = np.arange(10)
    assert prompt_digest(ids) == prompt_digest(ids.tolist()) == prompt_digest(np.arange(20)[::2] // 2)
    assert prompt_digest(ids) == prompt_digest(ids.astype(np.int32)) and len(prompt_digest(ids)) == 16
    assert prompt_digest(ids) != prompt_digest(ids[::-1]) and prompt_digest([]) != prompt_digest([0])
    # Files outlive the machine that wrote them.
    assert prompt_digest([1, 2, 300]) == hashlib.sha256(struct.pack("<3q", 1, 2, 300)).hexdigest()[:16]


def test_chat_prompts(build):
    messages = [{"role": "user", "content": "the cat"}]
    task = build([{"prompt": messages, "answer": 1}])
    wrapped = build([{"prompt": "the cat", "answer": 1}], apply_chat_template=True)
    expected = task.tokenizer.encode_chat(messages).tolist()
    assert task.prompts(0, 1)[0].prompt_ids.tolist() == wrapped.prompts(0, 1)[0].prompt_ids.tolist() == expected
    assert expected.count(0) == 1


def test_prompt_that_holds_its_end_of_text_token(build):
    """Field case D02: ids are ids; none is taken for padding."""
    group = build([{"prompt_ids": [1, 1, 5, 1], "answer": 1}]).prompts(0, 1)[0]
    assert group.prompt_ids.tolist() == [1, 1, 5, 1] and group.num_prefix_tokens == 3


def test_a_template_that_refuses_a_row_names_it(build):
    task = build([{"prompt": [{"role": "tool", "content": "x"}], "id": "t1", "answer": 1}])
    with pytest.raises(ConfigError, match=r"row 1 \(id 't1'\): .*no tools here"):
        task.prompts(0, 1)


def test_a_text_without_tokens_names_its_row(build, tmp_path):
    path = tiny_tokenizers.byte_level(tmp_path / "no_bos", add_bos=False, chat_template="{{ '' }}")
    task = build([{"prompt": [{"role": "user", "content": "x"}], "answer": 1}], tokenizer_model=str(path))
    with pytest.raises(ConfigError, match=r"row 1 \(id '1'\): the prompt has no tokens"):
        task.prompts(0, 1)


CHAT_ROW = {"prompt": [{"role": "user", "content": "a"}], "answer": 1}
REFUSED = [
    ({"train_files": ()}, ["--train-files"]),
    ({"tokenizer_model": "none"}, ["--tokenizer-model", "--hf-checkpoint"]),
    ({"tokenizer_model": "missing"}, ["missing", "--tokenizer-model"]),
    ({"train_files": ("missing.jsonl",)}, ["missing.jsonl"]),
    ({"train_batch_size": NUM_ROWS + 1}, ["7 prompts", "--train-batch-size 8"]),
    ({"vocab_size": 319}, ["319", "--vocab-size"]),
    ({"tokenizer": "spm", "apply_chat_template": True}, ["--apply-chat-template"]),
    ({"tokenizer": "bare", "rows": [*ROWS, CHAT_ROW]}, ["row 8", "chat template"]),
    ({"rows": [*ROWS, ROWS[2]]}, ["row 8 (id 'q2')", "row 3"]),
    ({"rows": [*ROWS, {"prompt": None, "id": "bad", "answer": 1}]}, ["row 8 (id 'bad')", "null"]),
]


@pytest.mark.parametrize("options, words", REFUSED, ids=[words[0] for _, words in REFUSED])
def test_what_cannot_be_run_is_said_before_the_run(build, options, words):
    with pytest.raises(ConfigError) as error:
        build(**options)
    for word in words:
        assert word in str(error.value)


def test_hf_checkpoint_is_the_tokenizer_unless_another_is_named(build, tokenizers):
    folder = str(tokenizers["byte_level"])
    assert build(tokenizer_model="none", hf_checkpoint=folder).tokenizer.vocab_size == 320
    assert build(tokenizer_model=str(tokenizers["spm"]), hf_checkpoint=folder).tokenizer.vocab_size == 340


def test_tokenizer_as_large_as_the_vocabulary(build):
    assert len(build(vocab_size=320).files) == NUM_ROWS


def test_either_files_or_a_function(configure):
    files, function = configure(), configure(train_files=(), prompt_function="examples.needle.task:task")
    assert task_maker(files) == FileTask.from_config and task_maker(function).__name__ == "task"
    for config in (configure(prompt_function="examples.needle.task:task"), configure(train_files=())):
        with pytest.raises(ConfigError, match="(?s)--train-files.*--prompt-function"):
            task_maker(config)


def test_responses_stop_at_the_tokenizers_end_of_text(configure, tokenizers, tmp_path):
    """Field case D03: unless all the stop ids are named."""
    def stop_ids(**options):
        config = configure(**options)
        return with_stop_ids(config, FileTask.from_config(config)).rollout.stop_token_ids

    assert stop_ids() == (1,)
    assert stop_ids(stop_token_ids=(3, 1, 2)) == (3, 1, 2)
    assert stop_ids(tokenizer_model=str(tiny_tokenizers.byte_level(tmp_path / "chat", eos_token=IM_END))) == (3,)
    with pytest.raises(ConfigError, match="--stop-token-ids"):
        stop_ids(tokenizer="bare")
    none = load_config(overrides={"train_files": ("x",), "stop_token_ids": ()})
    assert with_stop_ids(none, FileTask.from_config(configure(tokenizer="bare"))).rollout.stop_token_ids == ()


def test_prompts_of_two_million_tokens(build):
    """As ids and as text; their reading is timed generously."""
    num_tokens = 2_000_000
    rows = [{"prompt_ids": [5] * num_tokens, "answer": 1}, {"prompt": " the" * num_tokens, "answer": 1}]
    begin = time.perf_counter()
    task = build(rows, shuffle=False, tokenizer="spm")
    ids, text = task.prompts(0, 2)
    assert ids.num_prompt_tokens == num_tokens and text.num_prompt_tokens == num_tokens + 1
    assert time.perf_counter() - begin < 60
    check_prompts([ids, text], 512, load_config(overrides={"max_prompt_length": num_tokens + 1}).rollout)


def test_sampled_ids_are_the_trained_ids(build):
    """Field case I03: rendering for the reward leaves the response alone."""
    task = build()
    letters = {task.render(np.array([id])): id for id in range(task.tokenizer.vocab_size)}
    ids = np.array([letters[letter] for letter in "the"])
    group = PromptGroup([1], [Branch(ids, rollout_logprobs=-np.ones(3))])
    assert task.render(group.branches[0].response_ids) == "the"
    assert group.branches[0].response_ids is ids and task.tokenizer.encode("the")[1:].tolist() != ids.tolist()
