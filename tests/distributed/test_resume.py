"""A run that stops and goes on is the run that never stopped."""
import pytest

from tests.distributed.launch import run_ranks
from tests.training_runs import score, train

LAYOUTS = {
    "1 rank": (1, {}),
    "1 rank, bf16": (1, dict(bf16=True)),
    "dp2, distributed optimizer": (2, dict(use_distributed_optimizer=True)),
    "dp2, distributed optimizer, bf16, async": (2, dict(use_distributed_optimizer=True, bf16=True, async_save=True)),
    "tp2 + sp": (2, dict(tensor_model_parallel_size=2, sequence_parallel=True)),
    "pp2 x vpp2": (2, dict(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2, num_layers=4)),
    "cp2, two updates a step": (2, dict(context_parallel_size=2, ppo_epochs=2)),
    "ep2": (2, dict(expert_model_parallel_size=2, num_experts=4, moe_ffn_hidden_size=32)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_going_on_is_exact(layout, tmp_path):
    """Same losses, rewards and learning rates, and the same weights to the last bit, wherever it stops (J03, J05, J06)."""
    world_size, options = LAYOUTS[layout]
    straight = run_ranks(train, world_size, 4, {name: value for name, value in options.items() if name != "async_save"})
    for stop in (1, 3) if world_size == 1 else (2,):
        saving = options | {"save": str(tmp_path / f"checkpoints{stop}")}
        run_ranks(train, world_size, stop, saving)
        resumed = run_ranks(train, world_size, 4, saving)
        for whole, rest in zip(straight, resumed):
            assert rest["history"] == whole["history"][stop:]
            assert rest["weights"] == whole["weights"]
            assert any(f"goes on after step {stop}" in note for note in rest["notes"])


CHANGES = {
    "tp2 to one": (2, dict(tensor_model_parallel_size=2), 1, {}),
    "one to cp2": (1, {}, 2, dict(context_parallel_size=2)),
    "dp2 distributed to pp2": (2, dict(use_distributed_optimizer=True), 2, dict(pipeline_model_parallel_size=2, use_distributed_optimizer=True)),
    "ep2 to one": (
        2,
        dict(expert_model_parallel_size=2, num_experts=4, moe_ffn_hidden_size=32),
        1,
        dict(num_experts=4, moe_ffn_hidden_size=32),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_going_on_under_another_layout(change, tmp_path):
    """Equal up to the order of sums (global random states belong to ranks, so the reward draws nothing here)."""
    before_ranks, before, after_ranks, after = CHANGES[change]
    options = {"save": str(tmp_path / "checkpoints"), "clip_grad": 0.5}
    run_ranks(train, before_ranks, 2, before | options, score)
    moved = run_ranks(train, after_ranks, 4, after | options, score)[0]
    straight = run_ranks(train, before_ranks, 4, before | {"clip_grad": 0.5}, score)[0]
    for step, values in enumerate(moved["history"]):
        for name in ("actor/grad_norm", "actor/lr"):  # the others are of this rank's prompts
            value = values[name]
            assert value == pytest.approx(straight["history"][2 + step][name], rel=1e-4, abs=1e-6), (step, name)
