"""Metrics that merge: sums with their counts, totals, and maxima; a mean is taken once, at the end.

The mean of per-rank means is wrong as soon as ranks hold different numbers of tokens. Adding two MetricSums,
or all-reducing their vectors, gives what one rank holding all the tokens would have computed.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class MetricSums:
    """Three kinds of metric, by how they merge. A name belongs to one kind only."""

    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum, count); merges by adding both, reported as sum / count."""
    totals: dict[str, float] = field(default_factory=dict)
    """name -> sum; for values already normalised by a global count."""
    maxima: dict[str, float] = field(default_factory=dict)
    """name -> largest value; -inf over nothing."""

    def __post_init__(self):
        names = [*self.means, *self.totals, *self.maxima]
        assert len(names) == len(set(names)), f"a metric name is used for two kinds: {sorted(names)}"

    def __add__(self, other: MetricSums) -> MetricSums:
        means = dict(self.means)
        for name, (total, count) in other.means.items():
            old_total, old_count = means.get(name, (0.0, 0.0))
            means[name] = (old_total + total, old_count + count)
        totals = dict(self.totals)
        for name, value in other.totals.items():
            totals[name] = totals.get(name, 0.0) + value
        maxima = dict(self.maxima)
        for name, value in other.maxima.items():
            maxima[name] = float(np.maximum(maxima.get(name, -np.inf), value))  # np.maximum keeps NaN, max() may not
        return MetricSums(means, totals, maxima)

    def to_means(self) -> dict[str, float]:
        """The numbers to log. A mean or maximum over nothing is 0.0, not NaN or -inf."""
        report = {name: total / count if count else 0.0 for name, (total, count) in self.means.items()}
        report.update(self.totals)
        report.update({name: 0.0 if value == -np.inf else value for name, value in self.maxima.items()})
        return report

    def to_vector(self) -> tuple[np.ndarray, np.ndarray]:
        """(sums, maxima), float64, in the order of sorted names: all-reduce the first with SUM, the second with MAX.

        Every rank must hold the same names; a rank without branches gets them from `evaluate` on empty lists.
        """
        sums = [value for name in sorted(self.means) for value in self.means[name]]
        sums += [self.totals[name] for name in sorted(self.totals)]
        return np.array(sums, dtype=np.float64), np.array([self.maxima[name] for name in sorted(self.maxima)])

    def from_vector(self, sums: np.ndarray, maxima: np.ndarray) -> MetricSums:
        """The inverse of to_vector, under the names of self."""
        num_means = len(self.means)
        num_sums = 2 * num_means + len(self.totals)
        assert len(sums) == num_sums, f"got {len(sums)} sums, need {num_sums}: ranks hold different metrics"
        assert len(maxima) == len(self.maxima), f"got {len(maxima)} maxima, need {len(self.maxima)}"
        pairs = np.reshape(sums[: 2 * num_means], (num_means, 2))
        return MetricSums(
            {name: (float(total), float(count)) for name, (total, count) in zip(sorted(self.means), pairs)},
            {name: float(value) for name, value in zip(sorted(self.totals), sums[2 * num_means :])},
            {name: float(value) for name, value in zip(sorted(self.maxima), maxima)},
        )
