"""What a data file holds and what branch replay saves on it, in lines (validate_data.py)."""
from __future__ import annotations

from collections import Counter
from typing import Iterator, Sequence

BAR_WIDTH = 40


class Savings:
    """Tokens through the stack and attention of one step's gradient over groups, by schedule."""

    def __init__(self):
        self.whole = self.prompts = self.responses = 0
        self.attention_whole = self.attention_exact = self.attention_frozen = 0.0

    def add(self, prompt_tokens: int, response_tokens: Sequence[int]) -> None:
        """One group. Attention in forwards: a backward costs 2.5, and a response of R reads P tokens."""
        lengths = [tokens for tokens in response_tokens if tokens]
        self.whole += sum(prompt_tokens - 1 + tokens for tokens in lengths)
        self.prompts += prompt_tokens - 1
        self.responses += sum(lengths)
        prompt, replay = prompt_tokens**2 / 2, prompt_tokens * sum(lengths)
        self.attention_whole += 3.5 * (len(lengths) * prompt + replay)
        self.attention_exact += 3.5 * (prompt + replay)
        self.attention_frozen += prompt + 3.5 * replay

    def lines(self) -> Iterator[str]:
        yield "tokens through the stack, by schedule"
        for name, tokens, what in (
            ("whole sequences", self.whole, "every response with its prompt, forward and backward"),
            ("branch replay, exact", 2 * self.prompts + self.responses, "prompts forward and back, responses once"),
            ("branch replay, frozen", self.prompts + self.responses, "prompts forward only, responses once"),
        ):
            yield f"  {name:<22}{tokens:>17,}   {what}"
        if self.attention_exact:
            exact, frozen = (self.attention_whole / other for other in (self.attention_exact, self.attention_frozen))
            yield f"attention, the cost of long prompts: {exact:.1f} times less with exact, {frozen:.1f} with frozen"


def histogram(name: str, values: Sequence[int]) -> Iterator[str]:
    """Counts by powers of two."""
    if not values:
        return
    ordered = sorted(values)
    yield f"{name}: {ordered[0]:,} to {ordered[-1]:,}, median {ordered[len(ordered) // 2]:,}, sum {sum(ordered):,}"
    bins = Counter(value.bit_length() for value in ordered)
    for bits in range(min(bins), max(bins) + 1):
        low, high = (1 << bits) >> 1, max(0, (1 << bits) - 1)
        bar = "#" * -(-BAR_WIDTH * bins[bits] // max(bins.values()))
        yield f"  {low:>10,} - {high:>10,} {bins[bits]:>10,}  {bar}"
