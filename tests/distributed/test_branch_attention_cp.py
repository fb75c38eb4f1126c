"""Attention over a prefix that is sharded over ranks: every output and gradient equals dense float64 attention of
one process, whatever the lengths."""
import pytest
import torch
import torch.distributed as dist

from megatron_longstraw.prefix.decode import DecodeState, decode_attention
from megatron_longstraw.prefix.storage import Storage
from tests.attention_case import LAYER, AttentionCase, PackageRun, check, run_package, textbook, variants
from tests.distributed.launch import run_ranks
from tests.tolerances import assert_close

pytestmark = pytest.mark.dist

ON_HOST = Storage(kv_dtype="fp8", device_bytes=0, out_on_host=True)
CASES = variants(
    {
        "odd lengths": AttentionCase(packs=(7, 3)),
        "even lengths": AttentionCase(prefix_tokens=32, chunk_tokens=8, packs=(8,)),
        "branch of one token": AttentionCase(packs=(1,), branches=3),
        "prefix shorter than the ranks": AttentionCase(prefix_tokens=1),
        "last chunk shorter than the ranks": AttentionCase(prefix_tokens=17, chunk_tokens=16),
        "no prefix": AttentionCase(prefix_tokens=0),
        "prompt and response of one token": AttentionCase(prefix_tokens=0, packs=(1,), branches=1, multiple=2),
        "last 2 chunks": AttentionCase(walked_back=2, block_tokens=3),
        "frozen": AttentionCase(walked_back=0),
        "two prompts": AttentionCase(num_prompts=2, branches=3),
        "scale": AttentionCase(scale=1.7, heads=6, kv_heads=3),
        "rows padded for sequence parallelism": AttentionCase(multiple=2),
        "kept attention": AttentionCase(keep_attention=True),
        "forwards first": AttentionCase(forwards_first=True, keep_attention=True, walked_back=2),
        "fp8 in host memory": AttentionCase(keep_attention=True, prefix_tokens=17, chunk_tokens=6, storage=ON_HOST),
    },
    torch.float64,
)
CASES |= variants(
    {"several chunks": AttentionCase(), "two prompts": AttentionCase(num_prompts=2)}, torch.float32, torch.bfloat16
)

DECODE = {
    "prefix": AttentionCase(num_prompts=2, branches=2, packs=(5,)),
    "prefix on one rank only": AttentionCase(prefix_tokens=1, num_prompts=1, branches=3, packs=(4,)),
    "no prefix": AttentionCase(prefix_tokens=0, packs=(4,)),
    "fp8 in host memory": AttentionCase(branches=2, packs=(4,), storage=ON_HOST),
}
"""`branches` is the number of branches of each prompt that EACH rank decodes."""


def decode_inputs(case, rank, world_size):
    """Branches of rank r are the batch rows of a larger pack whose rows are prompt-major, rank by rank."""
    everyone = AttentionCase(**{**vars(case), "branches": case.branches * world_size})
    rows = [
        prompt * case.branches * world_size + rank * case.branches + branch
        for prompt in range(case.num_prompts)
        for branch in range(case.branches)
    ]
    return everyone, rows


def decode(case, rank, world_size, group):
    everyone, rows = decode_inputs(case, rank, world_size)
    run = PackageRun(everyone, group)
    for index in range(run.plan.num_chunks):
        run.capture(index)
    state = DecodeState(run.store, case.num_prompts, max_tokens=case.packs[0], position=case.prefix_tokens)
    steps = []
    for step in range(case.packs[0]):
        q, k, v = (run.inputs[f"pack0.{name}"][step : step + 1, rows] for name in "qkv")
        steps.append(decode_attention(q, k, v, state, LAYER, case.scale, group))
        state.advance()
    return torch.cat(steps)


def work(rank, world_size):
    group = dist.group.WORLD
    return {
        "attention": {name: run_package(case, group) for name, case in CASES.items()},
        "decode": {name: decode(case, rank, world_size, group) for name, case in DECODE.items()},
    }


@pytest.fixture(scope="module", params=[2, 4], ids=["cp2", "cp4"])
def results(request):
    return run_ranks(work, request.param, request.param)


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_every_gradient(results, name):
    """Each position's rows live on exactly one rank, so the ranks' tables add up to the whole."""
    parts = [result["attention"][name] for result in results]
    assert len({frozenset(part) for part in parts}) == 1
    check(CASES[name], {key: sum(part[key] for part in parts) for key in parts[0]})


@pytest.mark.parametrize("name", DECODE)
def test_decode_equals_dense_attention(results, name):
    """Each rank decodes whole branches of its own against everybody's part of the prefix."""
    case = DECODE[name]
    for rank, result in enumerate(results):
        everyone, rows = decode_inputs(case, rank, len(results))
        expected = textbook(everyone)["pack0.out"][:, rows]
        assert_close({"out": result["decode"][name]}, {"out": expected}, torch.float64, "value")
