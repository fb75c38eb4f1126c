"""Log-probabilities of labels from hidden states: vocab-parallel, in chunks of rows, only where they are wanted.

The head never sees a prompt position, logits never exist for more than `chunk_rows` rows (forward or backward),
and padded vocabulary rows get no probability and no gradient. Temperature divides the logits, as in sampling.
"""
from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor

from megatron_longstraw.context_parallel.collectives import group_rank, group_size


class ResponseHead:
    """The LM head of the last pipeline stage."""

    def __init__(self, model: GPTModel, vocab_size: int, temperature: float, chunk_rows: int, tp_group):
        self.model, self.tp_group = model, tp_group
        self.vocab_size, self.temperature, self.chunk_rows = vocab_size, temperature, chunk_rows

    @property
    def weight(self) -> Tensor:
        """[padded vocab / tp, h]; the embedding itself when tied on one stage."""
        if self.model.share_embeddings_and_output_weights and self.model.pre_process:
            return self.model.embedding.word_embeddings.weight
        return self.model.output_layer.weight

    def full_rows(self, hidden: Tensor) -> Tensor:
        """[s / tp, b, h] under sequence parallelism, else [s, b, h] -> all rows [s, b, h]. Backward sums the
        hidden gradient over tp (reduce-scatter or all-reduce), since each tp rank holds part of the vocabulary."""
        if self.model.config.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        return copy_to_tensor_model_parallel_region(hidden)

    def logprobs(self, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Log-prob of each label and entropy of each row.

        Shapes: rows [T, h], labels int64 [T]; returns float32 [T], [T].
        Gradient: rows (partial per tp rank, see `full_rows`) and the head weight; the entropy gets none.
        """
        return VocabParallelLogProb.apply(
            rows, self.weight, labels, self.temperature, self.vocab_size, self.chunk_rows, self.tp_group
        )

    def logits(self, rows: Tensor) -> Tensor:
        """float32 logits [T, vocab_size] at temperature 1, gathered over tp, for sampling (no gradient)."""
        local = rows.to(self.weight.dtype) @ self.weight.t()
        if group_size(self.tp_group) > 1:
            parts = [torch.empty_like(local) for _ in range(group_size(self.tp_group))]
            dist.all_gather(parts, local.contiguous(), group=self.tp_group)
            local = torch.cat(parts, dim=1)
        return local[:, : self.vocab_size].float()


class VocabParallelLogProb(torch.autograd.Function):
    """log softmax(rows W^T / temperature)[label] with W cut over tp by vocabulary; logits are recomputed in
    backward, so that memory is chunk_rows x vocab / tp whatever the number of rows."""

    @staticmethod
    def forward(ctx, rows, weight, labels, temperature, vocab_size, chunk_rows, tp_group):
        vocab = _LocalVocab(weight, vocab_size, temperature, tp_group)
        parts = [
            vocab.statistics(rows[begin : begin + chunk_rows], labels[begin : begin + chunk_rows])
            for begin in range(0, len(rows), chunk_rows)
        ]
        logprobs, entropy, lse = (torch.cat(x) for x in zip(*parts))
        ctx.save_for_backward(rows, weight, labels, lse)
        ctx.facts = (vocab_size, temperature, chunk_rows, tp_group)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, dlogprobs, _dentropy):
        rows, weight, labels, lse = ctx.saved_tensors
        vocab_size, temperature, chunk_rows, tp_group = ctx.facts
        vocab = _LocalVocab(weight, vocab_size, temperature, tp_group)
        drows = torch.empty_like(rows)
        dweight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for begin in range(0, len(rows), chunk_rows):
            part = slice(begin, begin + chunk_rows)
            dlogits = vocab.dlogits(rows[part], labels[part], lse[part], dlogprobs[part]).to(weight.dtype)
            drows[part] = (dlogits @ weight).to(rows.dtype)
            dweight += dlogits.t() @ rows[part].to(weight.dtype)
        return drows, dweight.to(weight.dtype), None, None, None, None, None


class _LocalVocab:
    """This rank's slice of the vocabulary."""

    def __init__(self, weight: Tensor, vocab_size: int, temperature: float, tp_group):
        self.weight, self.temperature, self.tp_group = weight, temperature, tp_group
        self.begin = group_rank(tp_group) * len(weight)
        self.num_valid = min(max(vocab_size - self.begin, 0), len(weight))

    def _logits(self, rows: Tensor) -> Tensor:
        logits = (rows.to(self.weight.dtype) @ self.weight.t()).float() / self.temperature
        logits[:, self.num_valid :] = float("-inf")
        return logits

    def _local_labels(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        here = (labels >= self.begin) & (labels < self.begin + self.num_valid)
        return here, torch.where(here, labels - self.begin, 0)

    def statistics(self, rows: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 (log-prob of the label, entropy, log-sum-exp), each [T], over the whole vocabulary."""
        logits = self._logits(rows)
        top = logits.max(dim=1).values
        if group_size(self.tp_group) > 1:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=self.tp_group)
        weights = torch.exp(logits - top.unsqueeze(1))
        here, local = self._local_labels(labels)
        label_logit = torch.where(here, logits.gather(1, local.unsqueeze(1)).squeeze(1), 0.0)
        logits[:, self.num_valid :] = 0.0  # 0 * -inf would make the entropy NaN
        sums = torch.stack([weights.sum(1), label_logit, (weights * logits).sum(1)])
        if group_size(self.tp_group) > 1:
            dist.all_reduce(sums, group=self.tp_group)
        lse = top + torch.log(sums[0])
        return sums[1] - lse, lse - sums[2] / sums[0], lse

    def dlogits(self, rows: Tensor, labels: Tensor, lse: Tensor, dlogprobs: Tensor) -> Tensor:
        """d(sum dlogprobs * logprobs)/d logits of temperature 1: dlogprobs * (one_hot - p) / temperature."""
        grad = -torch.exp(self._logits(rows) - lse.unsqueeze(1)) * dlogprobs.unsqueeze(1)
        here, local = self._local_labels(labels)
        grad.scatter_add_(1, local.unsqueeze(1), torch.where(here, dlogprobs, 0.0).unsqueeze(1))
        return grad / self.temperature
