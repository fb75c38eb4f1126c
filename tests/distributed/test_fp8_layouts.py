"""FP8 prompt passes give the same gradient in every layout, up to sums in another order."""
import pytest
from check_gradients import parameter_errors, step_gradients
from full_sequence_oracle import perturb
from gradient_case import make_case, parse

from megatron_longstraw.mcore import parallel
from megatron_longstraw.mcore.packing import batch_prompts
from megatron_longstraw.mcore.policy import Policy

from .gradient_cases import CP2, EP2, MOE, PP2, RECOMPUTE, TP2
from .launch import run_ranks

# Shards are whole blocks of 128 and no rows are padded, so that ranks scale their own as one rank scales all. What is
# left is a sum in another order that rounds to the next FP8 number, here and there.
WIDE = "--hidden-size 256 --ffn-hidden-size 256 --init-method-std 0.05 --prompt-tokens 149 --fp8-prefix blockwise"
NARROW = "--prompt-tokens 150 --fp8-prefix"
CASES = {
    "tp2": (WIDE, "--tensor-model-parallel-size 2", 1e-2),
    "tp2 sp, recompute, qkv-bias": (f"{WIDE} --add-qkv-bias", f"{TP2} {RECOMPUTE}", 1e-2),
    "pp2, recompute": (f"{NARROW} tensorwise", f"{PP2} {RECOMPUTE}", 1e-6),
    # Scales of a rank's own tokens, or of its own shards: roundings differ, by less than FP8 differs from float32.
    "cp2": (f"{NARROW} tensorwise", CP2, 0.2),
    "tp2 sp, tensorwise": (f"{NARROW} tensorwise", TP2, 0.2),
    "tp2 sp, moe": (f"{NARROW} blockwise {MOE}", TP2, 0.2),
}


def _gradients(rank, argv, reference):
    """Whole gradients by parameter, or their distance from `reference`."""
    config, args = parse(argv.split())
    layout = parallel.initialize(config)
    case = make_case(config, args, layout.dp_size)
    policy = Policy(config, layout)
    perturb(policy.chunks, config.model, config.run.seed)
    policy.weights_changed()
    grads, _, same = step_gradients(policy, batch_prompts(case.groups, 1), case.weights)
    assert same, "score equals replay"
    if reference is None:
        return {shard.name: grad for shard, grad in grads.values()}
    return parameter_errors(grads, reference)[0]


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("flags", "layout", "bound"), CASES.values(), ids=CASES)
def test_gradients_agree_with_one_rank(flags, layout, bound):
    (reference,) = run_ranks(_gradients, 1, flags, None)
    errors, _ = run_ranks(_gradients, 2, f"{flags} {layout}", reference)
    assert max(errors.values()) < bound, errors


def _keys_of_unequal_prompts(rank, argv):
    from tests.integration.test_fp8_prefix import keys_and_values

    config, args = parse(argv.split())
    layout = parallel.initialize(config)
    case = make_case(config, args, layout.dp_size)
    policy = Policy(config, layout)
    batches = batch_prompts(case.of_rank(layout.dp_rank, layout.dp_size), 1)
    seen = keys_and_values(lambda: step_gradients(policy, batches, case.weights))
    return {
        place: [bool((a == b).all()) for again in later for a, b in zip(first, again)]
        for place, (first, *later) in seen.items()
    }


@pytest.mark.dist
@pytest.mark.timeout(300)
def test_experts_of_other_ranks_give_the_stored_keys_and_values():
    """Chunks meet other chunks of the other rank's prompt when they run again, last first."""
    for seen in run_ranks(_keys_of_unequal_prompts, 2, f"--fp8-prefix blockwise {EP2} --prompt-tokens 200,70"):
        assert seen and all(same and all(same) for same in seen.values()), seen
