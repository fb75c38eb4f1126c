"""The planner's bytes against the tensors of built models, optimizers and stores, under several layouts."""
import numpy as np
import pytest
import torch.distributed as dist

from megatron_longstraw.mcore.calls import capture, replay
from megatron_longstraw.mcore.packing import PromptBatch
from megatron_longstraw.planner.bytes import bytes_of_rank
from megatron_longstraw.rollout import generate as generation
from tests.helpers import TINY, random_groups, tiny_trainer

from .launch import run_ranks

PROMPT_TOKENS = 72
BASE = dict(
    num_layers=4,
    kv_channels=16,
    max_prompt_length=PROMPT_TOKENS,
    prompts_per_microbatch=2,
    train_batch_size=8,
    group_size=3,
)
MOE = dict(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_shared_expert_intermediate_size=32)
LAYOUTS = {
    2: {
        "cp2": dict(context_parallel_size=2, qk_layernorm=True, prefix_grad="last:2"),
        "cp2, bf16, distributed optimizer": dict(context_parallel_size=2, bf16=True, use_distributed_optimizer=True),
        "cp2, host, bf16 K and V": dict(
            context_parallel_size=2, prefix_kv_tier="host", prefix_kv_dtype="bf16", prefix_out_tier="host"
        ),
        "tp2 sp": dict(tensor_model_parallel_size=2, sequence_parallel=True, add_qkv_bias=True, bf16=True),
        # K, V of one of the four layers fit: of 71 tokens of two prompts and one head, 16 codes and a scale each.
        "tp2 sp, fp8 and bf16, a layer on the device": dict(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            bf16=True,
            prefix_kv_dtype="fp8",
            prefix_grad_dtype="bf16",
            prefix_kv_tier="host",
            prefix_device_bytes=2 * (2 * 71 * 2 * (16 + 4)) - 1,
        ),
        "tp2, untied, out recomputed": dict(
            tensor_model_parallel_size=2, untie_embeddings_and_output_weights=True, prefix_out_tier="none"
        ),
        "pp2, tied": dict(pipeline_model_parallel_size=2),
        "pp2 vpp2, fp8, last:1, all but gradients on the device": dict(
            pipeline_model_parallel_size=2,
            num_virtual_stages_per_pipeline_rank=2,
            prefix_grad="last:1",
            prefix_kv_dtype="fp8",
            prefix_kv_tier="host",
            prefix_device_bytes=2 * (2 * 71 * 2 * 2 * (16 + 4)),
        ),
        "pp2 vpp2, untied, frozen": dict(
            pipeline_model_parallel_size=2,
            num_virtual_stages_per_pipeline_rank=2,
            untie_embeddings_and_output_weights=True,
            prefix_grad="frozen",
        ),
        "dp2, distributed optimizer": dict(use_distributed_optimizer=True),
        "ep2": MOE | dict(expert_model_parallel_size=2, use_distributed_optimizer=True),
        "tp2 sp with experts": MOE | dict(tensor_model_parallel_size=2, sequence_parallel=True),
    },
    4: {
        "tp2 sp x cp2": dict(
            tensor_model_parallel_size=2,
            sequence_parallel=True,
            context_parallel_size=2,
            use_distributed_optimizer=True,
        ),
        "ep2 x edp2": MOE | dict(expert_model_parallel_size=2, use_distributed_optimizer=True, bf16=True),
    },
}


def tensor_bytes(tensors) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def optimizer_bytes(optimizer, bf16: bool) -> int:
    """Moments, and the float32 copies that a bf16 model's optimizer steps on."""
    total = 0
    for part in getattr(optimizer._optimizer, "chained_optimizers", [optimizer._optimizer]):
        inner = part.optimizer
        total += tensor_bytes(x for state in inner.state.values() for name, x in state.items() if name != "step")
        total += tensor_bytes(x for group in inner.param_groups for x in group["params"]) * bf16
    return total


class RecordedDecodeState(generation.DecodeState):
    nbytes = 0

    def extend(self, *arguments):
        result = super().extend(*arguments)
        type(self).nbytes = tensor_bytes(x for pair in self.caches.values() for x in pair)
        return result


def held(rank: int, cases: dict) -> dict:
    """By case: (cp rank, stage, what is held on this rank, what the planner says)."""
    generation.DecodeState = RecordedDecodeState
    results = {}
    for name, options in cases.items():
        policy, optimizer = tiny_trainer(**BASE | options)
        layout, parameters = policy.layout, [p for chunk in policy.chunks for p in chunk.parameters()]
        batch = PromptBatch(random_groups(2, PROMPT_TOKENS, []))
        store = capture(policy, batch)
        captured = store.nbytes
        RecordedDecodeState.nbytes = 0
        generation.generate(policy, store, batch, step=0)
        places = ((prompt, index) for prompt, group in enumerate(batch.groups) for index in range(len(group.branches)))
        replay(policy, store, batch, {place: np.ones(TINY["max_response_length"], np.float32) for place in places})
        found = dict(
            weights=tensor_bytes(parameters),
            gradients=tensor_bytes(p.main_grad for p in parameters),
            captured=captured,
            grad=store.nbytes - captured,
            sampling_kv=RecordedDecodeState.nbytes,
        )
        store.release()
        policy.zero_grad()
        policy.finalize_gradients()
        optimizer.step()
        found["optimizer"] = optimizer_bytes(optimizer, policy.config.model.bf16)
        planned = bytes_of_rank(policy.config, dist.get_world_size(), layout.pp_rank)
        results[name] = (layout.cp_rank, layout.pp_rank, found, planned)
    return results


@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.parametrize("world_size", LAYOUTS)
def test_planned_bytes_are_those_held(world_size):
    ranks = run_ranks(held, world_size, LAYOUTS[world_size], timeout_s=200)
    for name, options in LAYOUTS[world_size].items():
        rows = [results[name] for results in ranks]
        for cp_rank, _, found, planned in rows:
            assert (found["weights"], found["gradients"]) == (planned.weights, planned.gradients), name
            assert found["sampling_kv"] == planned.sampling_kv, name
            of_prefix = [bytes for part in ("captured", "grad") for bytes in (found[part].device, found[part].host)]
            expected = [planned.prefix_kv + planned.prefix_attention, planned.host_capture]
            expected += [planned.prefix_grad, planned.host_grad]
            if cp_rank == 0:
                assert of_prefix == expected, name
            else:
                assert all(held <= most for held, most in zip(of_prefix, expected)), name
        held_by_all = sum(found["optimizer"] for _, _, found, _ in rows)
        planned_by_all = sum(planned.optimizer for _, _, _, planned in rows)
        # The distributed optimizer's shards are uneven, but add up.
        assert abs(held_by_all - planned_by_all) <= 2 * 12 * world_size, name
        if not options.get("use_distributed_optimizer"):
            assert all(found["optimizer"] == planned.optimizer for _, _, found, planned in rows), name
