"""The contenders of bench_peers.py: one GRPO gradient of one group on the weights of one Hugging Face folder.

All compute the gradient of the same loss, on-policy (ratio 1), token mean, no KL term:

    HuggingFace    one whole sequence per response, plain autograd of transformers' model; the reference
    Trl            GRPOTrainer.training_step on prepared inputs (what comes before it is generation and scoring)
    PrefixGrouper  the group as one row; prefix_grouper splits every attention into prompt and responses
    Longstraw      this project's BranchReplay.gradients

Each is built in a process of its own and imports what it needs there. Log-probs are asked for at response positions
only, wherever the contender lets its user say so.
"""
from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from allocation_tracker import peak_bytes_of


@dataclass(frozen=True)
class Case:
    """What every contender is given. No token is padding: all responses are equally long."""

    folder: str
    """Model in Hugging Face format; float32."""
    prompt_ids: np.ndarray
    """int64 [P]"""
    response_ids: np.ndarray
    """int64 [G, R]"""
    rewards: np.ndarray
    """float64 [G]"""
    advantages: np.ndarray
    """float32 [G]: GRPO's of these rewards."""
    options: dict
    """This project's configuration fields."""
    num_threads: int


class Contender:
    """One gradient step and its measures; see workers.py."""

    library: str | None = None
    """What has to be installed for it, of the extra `peers`."""

    def __init__(self, case: Case):
        torch.set_num_threads(case.num_threads)
        self.case = case

    def step(self) -> None:
        """From zeroed to complete gradients."""
        raise NotImplementedError

    def gradients(self) -> dict[str, Tensor]:
        """By Hugging Face's parameter name."""
        raise NotImplementedError

    def measure(self, gradient_file: str) -> dict:
        peak_bytes = peak_bytes_of(self.step)
        torch.save(self.gradients(), gradient_file)
        return {"peak_bytes": peak_bytes}

    def time(self) -> dict:
        start, cpu_start = time.perf_counter(), time.process_time()
        self.step()
        return {"total_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu_start}


class HuggingFace(Contender):
    """transformers' model; one response at a time, the model's own SDPA attention, no recompute."""

    attention = "sdpa"

    def __init__(self, case: Case, recompute: bool = False):
        from transformers import AutoModelForCausalLM

        super().__init__(case)
        self.model = AutoModelForCausalLM.from_pretrained(
            case.folder, dtype=torch.float32, attn_implementation=self.attention
        )
        self.model.train()
        if recompute:
            self.model.activation_checkpointing_enable()
        self.prompt, self.responses = torch.from_numpy(case.prompt_ids), torch.from_numpy(case.response_ids)
        self.advantages = torch.from_numpy(case.advantages)
        for parameter in self.model.parameters():  # counted as a gradient buffer, not as memory of the step
            parameter.grad = torch.zeros_like(parameter)

    def step(self) -> None:
        self.model.zero_grad(set_to_none=False)
        self.accumulate_gradients()

    def accumulate_gradients(self) -> None:
        num_tokens = self.responses.shape[1]
        for response, advantage in zip(self.responses, self.advantages):
            ids = torch.cat([self.prompt, response[:-1]])[None]
            logits = self.model(ids, use_cache=False, logits_to_keep=num_tokens).logits[0]
            self.loss(logits, response, advantage).backward()

    def loss(self, logits: Tensor, responses: Tensor, advantages: Tensor) -> Tensor:
        """This part's share of the token mean over the group. logits [.., R, V], responses [.., R], advantages [..].

        The ratio to the policy that sampled is 1, where clipping changes neither value nor gradient."""
        logprobs = logits.log_softmax(-1).gather(-1, responses[..., None])[..., 0]
        ratio = (logprobs - logprobs.detach()).exp()
        return -(ratio * advantages[..., None]).sum() / self.responses.numel()

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


class Trl(HuggingFace):
    """TRL's defaults (its dapo loss is the token mean, activations are recomputed) but float32.

    The whole group is one batch, as TRL's default of 8 makes it. `lean`: one response at a time, and only response
    positions through the LM head; TRL does the latter by itself where Triton runs.
    """

    library = "trl"

    def __init__(self, case: Case, lean: bool = False):
        import trl.trainer.utils
        from datasets import Dataset
        from transformers import Qwen2Tokenizer
        from trl import GRPOConfig, GRPOTrainer

        super().__init__(case, recompute=True)  # TRL's default, switched on by train() only
        group_size, num_tokens = case.response_ids.shape
        self.batch = group_size
        if lean:
            self.batch = 1
            assert callable(trl.trainer.utils._use_triton)  # asked for this only; the kernels ask one of their own
            trl.trainer.utils._use_triton = lambda device: True
        args = GRPOConfig(
            output_dir=case.folder,
            use_cpu=True,
            bf16=False,
            report_to="none",
            num_generations=group_size,
            max_completion_length=num_tokens,
            per_device_train_batch_size=self.batch,
            gradient_accumulation_steps=group_size // self.batch,
        )
        self.trainer = GRPOTrainer(
            model=self.model,
            reward_funcs=lambda **_: [0.0],
            args=args,
            processing_class=Qwen2Tokenizer(),
            train_dataset=Dataset.from_dict({"prompt": [""]}),
        )
        self.trainer._prepare_inputs = lambda inputs: inputs  # otherwise: generate and score
        self.trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps  # set by train() only

    def accumulate_gradients(self) -> None:
        for responses, advantages in zip(self.responses.split(self.batch), self.advantages.split(self.batch)):
            prompts = self.prompt.expand(len(responses), -1)
            inputs = {
                "prompt_ids": prompts,
                "prompt_mask": torch.ones_like(prompts),
                "completion_ids": responses,
                "completion_mask": torch.ones_like(responses),
                "advantages": advantages,
                "num_items_in_batch": torch.tensor(self.responses.numel()),
            }
            self.trainer.training_step(self.model, inputs, num_items_in_batch=None)


class PrefixGrouper(HuggingFace):
    """As its documentation says, with two savings that it leaves to the user: the prompt's causal square needs no
    mask, and only response positions pass the LM head."""

    library = "prefix_grouper"
    attention = "grouped"

    def __init__(self, case: Case, recompute: bool = False):
        from transformers import AttentionInterface

        AttentionInterface.register("grouped", _grouped_attention)
        super().__init__(case, recompute)

    def accumulate_gradients(self) -> None:
        from prefix_grouper import PrefixGrouper as Grouper

        prompt, responses = self.prompt[None], self.responses
        masks = torch.ones_like(prompt), torch.ones_like(responses)
        grouper = Grouper.from_ungrouped_masks(*masks, group_sizes=len(responses), padding_mode="right")
        ids = grouper.concat_input(prompt, masks[0], responses, masks[1])
        own = torch.arange(prompt.shape[1], prompt.shape[1] + responses.shape[1])
        positions = torch.cat([torch.arange(prompt.shape[1]), own.repeat(len(responses))])[None]
        backbone = self.model.base_model(ids, position_ids=positions, use_cache=False, prefix_grouper=grouper)
        *_, scored, _ = grouper.split_output(backbone.last_hidden_state, include_prefix_last=1)
        self.loss(self.model.lm_head(scored[:, :-1]), responses, self.advantages).backward()


def _grouped_attention(module, query, key, value, attention_mask, *, prefix_grouper, scaling, **_unused):
    return prefix_grouper.forward(_causal_attention, query, key, value, scaling), None


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, _padding: Tensor, scale: float) -> Tensor:
    """[b, N, Sq, D] and unexpanded [b, K, Sk, D] -> [b, Sq, N, D]; queries are the last Sq positions."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if num_queries < num_keys:
        mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


class Longstraw(Contender):
    """BranchReplay on the same folder; rewards in, gradients out."""

    def __init__(self, case: Case, prefix_grad: str):
        from megatron_longstraw import Branch, BranchReplay, PromptGroup, load_config
        from megatron_longstraw.convert.folder import HFFolder

        super().__init__(case)
        fields = {"hf_checkpoint": case.folder, "prefix_grad": prefix_grad}
        self.trainer = BranchReplay(load_config(overrides=case.options | fields))
        self.folder = HFFolder(case.folder)
        branches = [Branch(ids, reward=float(reward)) for ids, reward in zip(case.response_ids, case.rewards)]
        self.group = PromptGroup(case.prompt_ids, branches)

    def step(self) -> None:
        self.trainer.gradients([self.group])

    def gradients(self) -> dict[str, Tensor]:
        from megatron_longstraw.mcore.parameters import named_shards

        policy, entries = self.trainer.policy, self.folder.files.entries
        grads: dict[str, Tensor] = {}
        for shard, parameter in named_shards(policy.chunks, policy.config.model):
            for piece in self.folder.pieces(shard):
                grad = grads.setdefault(piece.name, torch.zeros(entries[piece.name].shape))
                grad[piece.source] = parameter.main_grad[piece.target]
        return grads
