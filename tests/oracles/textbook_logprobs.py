"""Textbook log-probabilities in float64: one softmax over the true vocabulary per row."""
from __future__ import annotations

import torch
from torch import Tensor


def textbook_logprobs(
    rows: Tensor, weight: Tensor, labels: Tensor, temperature: float, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """rows [T, h], weight [>= vocab_size, h], labels [T] -> log-prob of each label and entropy of each row, [T]."""
    logits = rows @ weight[:vocab_size].T / temperature
    probabilities = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    entropy = -(probabilities * torch.log(probabilities)).sum(1)
    picked = torch.stack([torch.log(probabilities[row, label]) for row, label in enumerate(labels.tolist())])
    return picked, entropy
