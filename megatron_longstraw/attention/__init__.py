"""Attention as tensors only: partial attention, its exact backward, and the merge of partial results."""
