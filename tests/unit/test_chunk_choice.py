"""The size of a prompt chunk, chosen from the bytes its activations may take."""
import pytest

from megatron_longstraw.config import ConfigError, load_config, to_toml
from megatron_longstraw.launch import start
from megatron_longstraw.mcore.policy import Policy
from megatron_longstraw.planner.bytes import activation_bytes
from megatron_longstraw.planner.chunks import with_chunk_tokens

BASE = dict(num_layers=4, hidden_size=256, vocab_size=1000, max_prompt_length=2**20, group_size=2, max_response_length=8)
CP2, CP3 = dict(context_parallel_size=2), dict(context_parallel_size=3)


def config_of(num_bytes, **options):
    return load_config(overrides=BASE | options | dict(prefix_activation_bytes=num_bytes)).resolve()


def needed(tokens, world_size=1, **options):
    """Estimated activations of the fullest micro-batch with chunks of that many tokens, on the fullest stage."""
    config = load_config(overrides=BASE | options | dict(prefix_chunk_tokens=tokens)).resolve()
    stages = range(config.parallel.pipeline_model_parallel_size)
    return max(activation_bytes(config, world_size, stage) for stage in stages)


@pytest.mark.parametrize("tokens", [128, 256, 4096, 2**20])
@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (1, {}),
        (2, dict(pipeline_model_parallel_size=2)),
        (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
        (1, dict(recompute_granularity="full")),
        (1, dict(prefix_mlp_block_tokens=64)),
    ],
    ids=str,
)
def test_the_largest_power_of_two_that_fits(tokens, world_size, options):
    fits = needed(tokens, world_size, **options)
    chosen = with_chunk_tokens(config_of(fits, **options), world_size).prefix
    assert (chosen.prefix_chunk_tokens, chosen.prefix_activation_bytes) == (tokens, None)
    if tokens > 128:
        assert with_chunk_tokens(config_of(fits - 1, **options), world_size).prefix.prefix_chunk_tokens == tokens // 2


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        (dict(max_prompt_length=5000), 8192),
        (dict(max_prompt_length=4097), 4096),
        (dict(max_prompt_length=1), 128),
        (CP2, 2**16),
        (CP2 | dict(max_prompt_length=16 * 512 + 1), 512),
        (CP2 | dict(max_prompt_length=15 * 512 + 1), 256),
        (CP2 | dict(max_prompt_length=1000), 128),
        (CP3 | dict(max_prompt_length=50_000), 2049),
    ],
)
def test_no_chunk_is_longer_than_of_use(options, tokens):
    """One that holds the whole prompt is long enough; over several ranks a prompt stays in 16 chunks, each of which they
    can share evenly."""
    config = config_of(2**50, **options)
    assert with_chunk_tokens(config, config.parallel.context_parallel_size).prefix.prefix_chunk_tokens == tokens


def test_too_few_bytes_name_the_fewest():
    least = needed(128)
    with pytest.raises(ConfigError) as failure:
        with_chunk_tokens(config_of(least - 1), 1)
    (problem,) = failure.value.problems
    assert f"got prefix_activation_bytes {least - 1}, need at least {least}, for chunks of 128 tokens" in problem
    assert "change --prefix-activation-bytes or" in problem


def test_a_chosen_chunk_obeys_the_rules():
    with pytest.raises(ConfigError, match="prefix_mlp_block_tokens 4096 for 128 rows"):
        with_chunk_tokens(config_of(needed(128), prefix_mlp_block_tokens=4096), 1)


def test_without_bytes_nothing_is_chosen():
    config = load_config(overrides=BASE).resolve()
    assert with_chunk_tokens(config, 1) is config


def test_the_choice_is_in_the_plan_and_can_be_read_back():
    flags = ["--prompt-function", "my:task", "--max-prompt-length", "4097", "--prefix-activation-bytes", "1G"]
    text = start("mod", [*flags, "--dry-run", "--world-size", "1"], {})
    assert "longest prompt 4,097 in 1 chunk of 4,096" in text
    chosen = with_chunk_tokens(config_of(needed(256)), 1)
    assert "prefix_chunk_tokens = 256" in to_toml(chosen) and "# prefix_activation_bytes is unset" in to_toml(chosen)


def test_a_policy_takes_no_chunk_that_is_still_to_be_chosen():
    with pytest.raises(ConfigError, match="where nothing chooses a chunk by it.*--prefix-chunk-tokens"):
        Policy(config_of(2**30), layout=None)
