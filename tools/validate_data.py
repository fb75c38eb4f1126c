"""Would training accept this prompt or rollout file, what is in it, and what branch replay saves on it.

    python tools/validate_data.py prompts.jsonl --tokenizer model_folder --max-prompt-length 32768
    python tools/validate_data.py runs/mine/rollouts.jsonl --config my_run.toml

Exit status 0: training would accept the file, 1: it would not. Every row that it would refuse is a line with its number
and id. Takes every training flag and file; limits (--vocab-size, --max-prompt-length, --max-response-length,
--train-batch-size) are checked where they are given. Reads a row at a time on one core and says how fast.
"""
from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Sequence

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron_longstraw.config import SETTINGS, Config, parse_args
from megatron_longstraw.data.prompt_files import iter_rows
from megatron_longstraw.data.prompt_rows import PromptRow, parse_prompt_row
from megatron_longstraw.data.rollout_groups import GroupOrder
from megatron_longstraw.data.rollout_rows import ONLY_ROLLOUTS, Limits, RolloutRow, parse_rollout_row
from megatron_longstraw.data.rows import RowError, iter_lines, parse_line
from megatron_longstraw.data.tokenizers import Tokenizer, TokenizerError, encode_prompt, load_tokenizer
from data_report import Savings, histogram

class Findings:
    """What is wrong with a file; a line each is printed at once, up to a number."""

    def __init__(self, path: str, max_errors: int):
        self.path, self.max_errors, self.count = path, max_errors, 0

    def add(self, problem: str) -> None:
        self.count += 1
        if self.count <= self.max_errors:
            print(f"{self.path}: {problem}")


class RolloutCheck:
    """A rollout file, row by row."""

    limited_by = ("vocab_size", "max_prompt_length", "max_response_length")

    def __init__(self, config: Config, findings: Findings, tokenizer: Tokenizer | None = None):
        self.config, self.findings, self.limits = config, findings, given_limits(config)
        if tokenizer is not None and self.limits.vocab_size is None:
            self.limits = replace(self.limits, vocab_size=tokenizer.vocab_size)
        self.order = GroupOrder()
        self.num_rows = self.loss_tokens = self.without_logprobs = self.unscored = 0
        self.prompt_lengths: list[int] = []
        self.response_lengths: list[int] = []
        self.group_sizes: Counter[int] = Counter()
        self.groups_of_step: dict[int, int] = {}
        self.savings = Savings()
        self._lengths: list[int] = []

    def run(self, path: str) -> None:
        number = 0
        for line in iter_lines(path, self.config.data.max_row_bytes):
            number, row = line.number, {}
            try:
                row = parse_line(line)
                parsed = parse_rollout_row(row, self.limits)
            except RowError as error:
                self.findings.add(f"row {number}: {error}")
                if row and not self._goes_on(row.get("step"), row.get("group_id")):
                    self._close_group()
                self.order.skip(row)
                continue
            try:
                self._follow(parsed)
            except RowError as error:
                self.findings.add(f"row {number}: {error}")
            self._count(parsed)
        self.num_rows = number
        self._close_group()
        try:
            self.order.finish()
        except RowError as error:
            self.findings.add(f"row {number}: {error}")
        self._check_steps()

    def _follow(self, row: RolloutRow) -> None:
        if not self._goes_on(row.step, row.group_id):
            self._close_group()
        try:
            self.order.follow(row)
        finally:
            self.groups_of_step[self.order.step] = self.order.num_groups

    def _goes_on(self, step: Any, group_id: Any) -> bool:
        return (step, group_id) == (self.order.step, self.order.group_id)

    def _count(self, row: RolloutRow) -> None:
        num_tokens = len(row.response_ids)
        self._lengths.append(num_tokens)
        self.response_lengths.append(num_tokens)
        self.loss_tokens += num_tokens if row.loss_mask is None else sum(row.loss_mask)
        self.without_logprobs += row.response_logprobs is None
        self.unscored += row.reward is None

    def _close_group(self) -> None:
        if self._lengths:
            self.group_sizes[len(self._lengths)] += 1
            if self.order.num_prompt_tokens is not None:
                self.prompt_lengths.append(self.order.num_prompt_tokens)
                self.savings.add(self.order.num_prompt_tokens, self._lengths)
        self._lengths = []

    def _check_steps(self) -> None:
        """What a run asks of all steps together; said once the rows are right."""
        steps = sorted(self.groups_of_step)
        if self.findings.count or not steps:
            return
        if steps != list(range(len(steps))):
            missing = next(step for step in range(steps[-1]) if step not in self.groups_of_step)
            self.findings.add(f"has no rows of step {missing}; need one step after the other from 0")
        expected = self.groups_of_step[steps[0]]
        if "train_batch_size" in self.config.given:
            expected = self.config.algorithm.train_batch_size
        for step in steps:
            if self.groups_of_step[step] != expected:
                self.findings.add(
                    f"step {step} has {self.groups_of_step[step]} groups, need {expected} in every step; "
                    f"change --train-batch-size"
                )

    def lines(self) -> Iterator[str]:
        groups, responses = sum(self.group_sizes.values()), len(self.response_lengths)
        yield f"{self.num_rows:,} rows: {len(self.groups_of_step):,} steps, {groups:,} groups, {responses:,} responses"
        yield (
            f"{self.loss_tokens:,} tokens train; {self.unscored:,} responses without a score, "
            f"{self.without_logprobs:,} without log-probs, {self.response_lengths.count(0):,} empty"
        )
        yield from histogram("prompt tokens", self.prompt_lengths)
        yield from histogram("response tokens", self.response_lengths)
        if not groups:
            return
        yield "group sizes: " + ", ".join(f"{count:,} of {size}" for size, count in sorted(self.group_sizes.items()))
        yield from self.savings.lines()


class PromptCheck:
    """A prompt file, row by row."""

    limited_by = ("vocab_size", "max_prompt_length")

    def __init__(self, config: Config, findings: Findings, tokenizer: Tokenizer | None = None):
        self.config, self.findings, self.tokenizer = config, findings, tokenizer
        self.limits = given_limits(config)
        self.lengths: dict[str, list[int]] = {"characters": [], "tokens": []}
        self.sources: Counter[str] = Counter()
        self.num_rows = self.num_too_long = 0
        self.ids: dict[int, int] = {}

    def run(self, path: str) -> None:
        for number, row in iter_rows(path, self.config.data.max_row_bytes):
            self.num_rows = number
            try:
                if isinstance(row, RowError):
                    raise row
                self._count(parse_prompt_row(row, self.config.data, number), number)
            except RowError as error:
                self.findings.add(str(error))
        least = self.config.algorithm.train_batch_size
        if len(self.ids) < least:
            self.findings.add(f"has {len(self.ids)} prompts, need at least --train-batch-size {least}")

    def _count(self, row: PromptRow, number: int) -> None:
        first = self.ids.setdefault(hash(row.id), number)
        if first != number:
            self.findings.add(f"row {number} (id {row.id!r}): the same id as row {first}; change --id-key or the row")
        self.sources[row.data_source] += 1
        ids = self._final_ids(row, number)
        if ids is None:
            texts = [row.prompt] if isinstance(row.prompt, str) else [message["content"] for message in row.prompt]
            self.lengths["characters"].append(sum(map(len, texts)))
            return
        num_tokens, limit, end = len(ids), self.limits.max_prompt_length, self.limits.vocab_size
        self.lengths["tokens"].append(num_tokens)
        if end is not None and ids.max(initial=0) >= end:
            self.findings.add(
                f"row {number} (id {row.id!r}): the prompt holds id {ids.max()}; ids must be in 0..{end - 1}: "
                f"use the model's tokenizer or change --vocab-size"
            )
        if limit is not None and num_tokens > limit:
            self.num_too_long += 1
            if self.config.data.truncation == "error":
                self.findings.add(
                    f"row {number} (id {row.id!r}): the prompt has {num_tokens} tokens; the limit is {limit}: "
                    f"shorten it, raise --max-prompt-length, or set --truncation left, right or filter"
                )

    def _final_ids(self, row: PromptRow, number: int) -> np.ndarray | None:
        """The ids before any truncation, where they can be known."""
        if self.tokenizer is None:
            return row.prompt if isinstance(row.prompt, np.ndarray) else None
        try:
            return encode_prompt(self.tokenizer, row.prompt, self.config.data.apply_chat_template)
        except TokenizerError as error:
            self.findings.add(f"row {number} (id {row.id!r}): {error}")
            return None

    def lines(self) -> Iterator[str]:
        names = ", ".join(f"{count:,} of {name or 'no source'}" for name, count in self.sources.most_common(10))
        yield f"{self.num_rows:,} rows: {names or 'none to train on'}"
        for unit, lengths in self.lengths.items():
            yield from histogram(f"prompt {unit}", lengths)
        if self.num_too_long:
            yield (
                f"{self.num_too_long:,} longer than --max-prompt-length {self.limits.max_prompt_length}: "
                f"truncation {self.config.data.truncation}"
            )
        if not self.lengths["tokens"]:
            yield "token lengths: add --tokenizer"
            return
        rollout, savings = self.config.rollout, Savings()
        for tokens in self.lengths["tokens"]:
            savings.add(tokens, [rollout.max_response_length] * rollout.group_size)
        yield (
            f"with --group-size {rollout.group_size} and responses of --max-response-length "
            f"{rollout.max_response_length}, once over the file:"
        )
        yield from savings.lines()


def given_limits(config: Config) -> Limits:
    """The limits that a flag or file set: defaults say nothing about somebody's data."""
    limits = Limits.of(config)
    return Limits(**{name: getattr(limits, name) for name in limits.__dataclass_fields__ if name in config.given})


def _tokenizer(path: str | None) -> Tokenizer | None:
    if path is None:
        return None
    return load_tokenizer(path)


def is_rollout_file(path: str, max_row_bytes: int) -> bool:
    """By the keys of the first row that can be read."""
    for line in iter_lines(path, max_row_bytes):
        try:
            return bool(ONLY_ROLLOUTS & parse_line(line).keys())
        except RowError:
            continue
    return False


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE", help="JSONL or Parquet of prompts, or JSONL of rollouts")
    parser.add_argument("--kind", choices=("prompts", "rollouts"), help="of FILE (default: what its rows look like)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="count tokens with it and hold ids against it (default: --tokenizer-model)"
    )
    parser.add_argument("--max-errors", type=int, default=100, metavar="N", help="print at most this many (100)")
    try:
        config, args = parse_args(argv, extra=parser)
        return validate(config, args)
    except OSError as error:
        print(f"{args.file}: cannot be read ({error.strerror})", file=sys.stderr)
    except ValueError as error:
        print(error, file=sys.stderr)
    return 1


def validate(config: Config, args: argparse.Namespace) -> int:
    """Print the report of a file; the exit status."""
    path = args.file
    num_bytes = Path(path).stat().st_size
    findings = Findings(path, args.max_errors)
    kind = args.kind
    if kind is None:
        is_table = path.endswith(".parquet")
        kind = "rollouts" if not is_table and is_rollout_file(path, config.data.max_row_bytes) else "prompts"
    tokenizer = _tokenizer(args.tokenizer or config.data.tokenizer_model)
    check = (RolloutCheck if kind == "rollouts" else PromptCheck)(config, findings, tokenizer)
    begin = time.process_time()
    check.run(path)
    seconds = time.process_time() - begin
    if check.num_rows == 0:
        findings.add("is empty")
    if findings.count > args.max_errors:
        print(f"{path}: and {findings.count - args.max_errors:,} more")
    print(f"{path}: {kind}, {num_bytes:,} bytes")
    for line in check.lines():
        print(line)
    unknown = [SETTINGS[name].flag for name in check.limited_by if getattr(check.limits, name) is None]
    if unknown:
        print(f"not checked, because not given: {', '.join(unknown)}")
    print(f"read at {num_bytes / 1e6 / max(seconds, 1e-9):.0f} MB/s on one core ({seconds:.2f} s)")
    print(f"refused: {findings.count:,} problems" if findings.count else "accepted")
    return 1 if findings.count else 0


if __name__ == "__main__":
    sys.exit(main())
