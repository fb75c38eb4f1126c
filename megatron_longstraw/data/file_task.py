"""Prompts of files as a task: which rows a step reads, their final ids, and what becomes of those that are too long."""
from __future__ import annotations

import functools

import numpy as np

from megatron_longstraw.config import Config, ConfigError
from megatron_longstraw.data.prompt_rows import PromptRow
from megatron_longstraw.data.prompt_set import PromptSet
from megatron_longstraw.data.tokenizers import Tokenizer, TokenizerError, encode_prompt, load_tokenizer
from megatron_longstraw.types import PromptGroup


class FileTask:
    """Rows of `--train-files`, in an order that depends on seed and epoch only.

    Which rows a step gets is computed from its number: no state to save, the same on every rank and after a resume.
    An epoch ends where the rows do, also inside a step.

    Raises:
        ConfigError: a row cannot be tokenized (found here under `--truncation filter` only), or too few rows are left.
    """

    def __init__(self, files: PromptSet, tokenizer: Tokenizer, config: Config):
        self.files, self.tokenizer = files, tokenizer
        self.data, self.limit = config.data, config.rollout.max_prompt_length
        self.seed = config.run.seed
        self.kept = np.arange(len(files))
        """Places of the rows that are read."""
        if self.data.truncation == "filter" and self.limit is not None:
            lengths = [len(self._all_ids(place, row)) for place, row in enumerate(files)]
            self.kept = np.flatnonzero(np.array(lengths) <= self.limit)
        needed = config.algorithm.train_batch_size
        if len(self.kept) < needed:
            raise ConfigError([
                f"got {len(self.kept)} prompts ({self.num_left_out} more are longer than --max-prompt-length), "
                f"need at least --train-batch-size {needed}; change --train-files or --train-batch-size"
            ])  # fmt: skip

    @classmethod
    def from_config(cls, config: Config) -> FileTask:
        """Raises:
        ConfigError: no files or tokenizer are named, or they cannot be used with this configuration.
        """
        path = config.data.tokenizer_model or config.checkpoint.hf_checkpoint
        problems = []
        if not config.data.train_files:
            problems.append("no prompts; name files with --train-files")
        if path is None:
            problems.append("no tokenizer for --train-files; name one with --tokenizer-model or --hf-checkpoint")
        if problems:
            raise ConfigError(problems)
        try:
            tokenizer = load_tokenizer(path)
        except TokenizerError as error:
            raise ConfigError([str(error)]) from error
        if tokenizer.vocab_size > config.model.vocab_size:
            problems.append(
                f"tokenizer {path} has ids up to {tokenizer.vocab_size - 1}, need ids below vocab_size "
                f"{config.model.vocab_size}; change --tokenizer-model or --vocab-size"
            )
        if config.data.apply_chat_template and not tokenizer.has_chat_template:
            problems.append(
                f"tokenizer {path} has no chat template for apply_chat_template; change --tokenizer-model or "
                f"--apply-chat-template"
            )
        if problems:
            raise ConfigError(problems)
        files = PromptSet(config.data.train_files, config.data)
        if files.first_chat is not None and not tokenizer.has_chat_template:
            raise ConfigError([
                f"{files.where(files.first_chat)}: the prompt is messages, and tokenizer {path} has no chat template; "
                f"change --tokenizer-model or --train-files"
            ])  # fmt: skip
        return cls(files, tokenizer, config)

    @property
    def num_left_out(self) -> int:
        return len(self.files) - len(self.kept)

    def describe(self) -> str:
        """One line for the screen."""
        left_out = f", {self.num_left_out} longer than {self.limit} tokens left out" if self.num_left_out else ""
        files = len(self.data.train_files)
        return f"{len(self.kept):,} rows of {files} file{'s' if files != 1 else ''}{left_out}"

    def prompts(self, step: int, num_prompts: int) -> list[PromptGroup]:
        """The prompts of a step. `group_id` is "N:row id", N counting all prompts since step 0, so that a row that
        comes twice is sampled twice (see `row_id`).

        Raises:
            ConfigError: a row cannot be tokenized, or is too long under `--truncation error`; names it.
            PromptFileError: a file was changed since the run began.
        """
        numbers = range(step * num_prompts, (step + 1) * num_prompts)
        places = [self._place(number) for number in numbers]
        return [
            PromptGroup(
                self._ids(place, row),
                group_id=f"{number}:{row.id}",
                data_source=row.data_source,
                ground_truth=row.ground_truth,
                extra_info=row.extra_info,
            )
            for number, place, row in zip(numbers, places, self.files.rows(places))
        ]

    def render(self, token_ids: np.ndarray) -> str:
        return self.tokenizer.decode(token_ids)

    def _place(self, number: int) -> int:
        epoch, position = divmod(number, len(self.kept))
        order = epoch_order(self.seed, epoch, len(self.kept)) if self.data.shuffle else range(len(self.kept))
        return int(self.kept[order[position]])

    def _ids(self, place: int, row: PromptRow) -> np.ndarray:
        ids = self._all_ids(place, row)
        if self.limit is None or len(ids) <= self.limit:
            return ids
        if self.data.truncation == "left":
            return ids[-self.limit :]
        if self.data.truncation == "right":
            return ids[: self.limit]
        raise self._error(
            place,
            row,
            f"the prompt has {len(ids)} tokens; the limit is {self.limit}: shorten it, raise --max-prompt-length, or "
            f"set --truncation left, right or filter",
        )

    def _all_ids(self, place: int, row: PromptRow) -> np.ndarray:
        """The final ids before any truncation."""
        try:
            prompt = encode_prompt(self.tokenizer, row.prompt, self.data.apply_chat_template)
        except TokenizerError as error:
            raise self._error(place, row, str(error)) from error
        if len(prompt) == 0:
            raise self._error(place, row, "the prompt has no tokens; need at least one; change the row")
        return prompt

    def _error(self, place: int, row: PromptRow, problem: str) -> ConfigError:
        return ConfigError([f"{self.files.where(place)} (id {row.id!r}): {problem}"])


def row_id(group_id: str) -> str:
    """The id of the row that a group of a `FileTask` came from."""
    return group_id.partition(":")[2]


@functools.lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """int64 [num_rows]: the rows in the order of an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
