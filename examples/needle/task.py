"""A digit and a capital lost among small letters: the smallest task whose answer needs the whole prompt.

A prompt is small letters with one digit and one capital (A to J) at two random places, and a final question mark; the
answer is the digit, then the capital. The model's vocabulary of 64 ids is also all the tokenizer there is.
"""
from __future__ import annotations

import string

import numpy as np

from megatron_longstraw.config import Config
from megatron_longstraw.types import Branch, PromptGroup

VOCABULARY = string.ascii_lowercase + string.digits + string.ascii_uppercase + "?_"
SMALL, DIGITS, CAPITALS = (0, 26), (26, 36), (36, 46)
ASK = VOCABULARY.index("?")
ANSWER_TOKENS = 2


class Needle:
    """Prompts of `num_tokens` tokens, drawn by (seed, step), so that every rank and every resume sees the same."""

    def __init__(self, num_tokens: int, seed: int):
        self.num_tokens, self.seed = num_tokens, seed

    def prompts(self, step: int, num_prompts: int) -> list[PromptGroup]:
        rng = np.random.default_rng([self.seed, self.num_tokens, step])
        return [self._prompt(rng, f"{step}-{number}") for number in range(num_prompts)]

    def _prompt(self, rng: np.random.Generator, group_id: str) -> PromptGroup:
        ids = rng.integers(*SMALL, self.num_tokens)
        ids[-1] = ASK
        answer = np.array([rng.integers(*DIGITS), rng.integers(*CAPITALS)])
        ids[rng.choice(self.num_tokens - 1, ANSWER_TOKENS, replace=False)] = answer
        return PromptGroup(ids, group_id=group_id, data_source="needle", ground_truth=self.render(answer))

    def answered(self, step: int, num_prompts: int) -> list[PromptGroup]:
        """The same prompts with their right answer as the only response, for supervised training."""
        groups = self.prompts(step, num_prompts)
        for group in groups:
            answer = np.array([VOCABULARY.index(symbol) for symbol in group.ground_truth])
            group.branches = [Branch(answer, reward=1.0)]
        return groups

    def render(self, token_ids: np.ndarray) -> str:
        return "".join(VOCABULARY[token] for token in token_ids)


def task(config: Config) -> Needle:
    """For --prompt-function: prompts as long as --max-prompt-length says."""
    return Needle(config.rollout.max_prompt_length or 1024, config.run.seed)


def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict) -> dict[str, float]:
    """Share of symbols right (what is learned from), and whether both are (what is reported)."""
    right = sum(got == want for got, want in zip(solution_str, ground_truth))
    return {"score": right / ANSWER_TOKENS, "all_right": float(right == ANSWER_TOKENS)}
