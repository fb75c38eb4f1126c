"""The product's promise: exact gradients in every layout. If one of these fails, training is silently wrong.

Per-parameter ||dg|| / ||g|| against plain autograd of the stock model over full sequences (never a cosine: chunks
walked in the wrong order are 31 % off at cosine 0.9987).
"""
import functools

import pytest
from check_gradients import run_all

from . import mutants
from .gradient_cases import CASES, MUTATIONS, ROUNDED
from .launch import run_ranks

WORST_PARAM_REL_ERR = 5e-6
MAX_LOGPROB_DIFF = 1e-5
MUTANT_REL_ERR = 1e-3
"""The mildest mistake is a hundred times past the bound, so the bound is no accident."""


@pytest.fixture(scope="module")
def oracle_cache(tmp_path_factory):
    """One folder of oracle answers for all workers of a run."""
    root = tmp_path_factory.getbasetemp()
    return (root.parent if root.name.startswith("popen-") else root) / "oracle"


@functools.cache
def results_of(world_size: int, cache: str) -> dict[str, dict]:
    """All cases of a world size, from one start of its ranks."""
    cases = CASES[world_size]
    argvs = [flags.split() + ["--oracle-cache", cache] for flags in cases.values()]
    return dict(zip(cases, run_ranks(_run_cases, world_size, argvs, timeout_s=600.0)[0]))


def _run_cases(rank: int, argvs: list[list[str]]) -> list[dict]:
    return run_all(argvs)


def _run_mutant(rank: int, mutation: str, argv: list[str]) -> list[dict]:
    mutants.apply(mutation)
    return run_all([argv])


PARAMS = [
    pytest.param(world_size, name, id=f"{world_size}: {name}") for world_size, cases in CASES.items() for name in cases
]


@pytest.mark.dist
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size, name", PARAMS)
def test_gradients_equal_full_sequences(world_size, name, oracle_cache):
    result = results_of(world_size, str(oracle_cache))[name]
    assert result["worst_param_rel_err"] <= WORST_PARAM_REL_ERR, result
    assert result["max_logprob_diff"] <= MAX_LOGPROB_DIFF, result
    if "max_decode_diff" in result:
        assert result["score_equals_replay"], result
        assert result["max_decode_diff"] <= MAX_LOGPROB_DIFF, result


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutants_fail(mutation, oracle_cache):
    """The comparison above has teeth: each known mistake is far outside its bound."""
    argv = MUTATIONS[mutation].split() + ["--oracle-cache", str(oracle_cache)]
    world_size = 2 if MUTATIONS[mutation] else 1
    result = run_ranks(_run_mutant, world_size, mutation, argv, timeout_s=200.0)[0][0]
    assert result["worst_param_rel_err"] > MUTANT_REL_ERR, result
    assert not result["ok"]


@pytest.mark.dist
def test_frozen_is_biased_and_last_n_lies_between(oracle_cache):
    """The dial does something: the cosine with the exact gradient grows from frozen to exact."""
    exact = results_of(1, str(oracle_cache))["one rank"]
    assert 0.5 < exact["cosine_frozen_vs_exact"] < 0.99


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_rounding_the_prefix_state_costs_what_it_must(oracle_cache):
    """Errors of the formats' size: less means that nothing was rounded. Sampling, score and replay still agree, because
    all of them read the same rounded state."""
    argvs = [flags.split() + ["--oracle-cache", str(oracle_cache)] for flags, _, _ in ROUNDED.values()]
    for result, (_, gradient, logprob) in zip(run_ranks(_run_cases, 1, argvs, timeout_s=200.0)[0], ROUNDED.values()):
        assert gradient / 10 <= result["worst_param_rel_err"] <= gradient, result
        assert result["max_logprob_diff"] <= logprob, result
        assert result["score_equals_replay"], result
        assert result["max_decode_diff"] <= MAX_LOGPROB_DIFF, result


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_bfloat16_is_as_exact_as_the_stock_model_in_bfloat16(oracle_cache):
    """Judged by the stock model's own distance from float32, not by a constant."""
    argv = "--bf16 --context-parallel-size 2 --recompute-granularity full".split() + ["--oracle-cache", str(oracle_cache)]
    (result,) = run_ranks(_run_cases, 2, [argv], timeout_s=200.0)[0]
    assert result["rel_err"] <= 1.5 * result["stock_bf16_rel_err"], result
    assert 1e-4 < result["stock_bf16_rel_err"] < 0.1, "both really ran in bfloat16"
    assert result["score_equals_replay"], result
