"""RMSNorm without Transformer Engine or apex, under sequence parallelism too.

Megatron's WrappedTorchNorm (transformer/torch_norm.py:32) refuses sequence parallelism. The norm works token by
token, so all it takes is the mark on the weight that makes finalize_model_grads sum its gradient over tp.
"""
from __future__ import annotations

import torch


class TorchRMSNorm(torch.nn.RMSNorm):
    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_unused):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel
