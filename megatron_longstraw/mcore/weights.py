"""Where a model's first weights come from."""
from __future__ import annotations

from megatron.core.models.gpt import GPTModel

from megatron_longstraw.config import Config
from megatron_longstraw.convert.folder import HFFolder
from megatron_longstraw.mcore.checkpoint import load_weights, require_newest
from megatron_longstraw.mcore.checkpoint_folder import Checkpoint
from megatron_longstraw.mcore.hf_weights import load_hf
from megatron_longstraw.mcore.parameters import initialize_weights


def set_weights(
    chunks: list[GPTModel], config: Config, hf_folder: HFFolder | None, checkpoint: Checkpoint | None = None
) -> None:
    """This Megatron checkpoint, else the newest of --load, else a Hugging Face folder (--hf-checkpoint), else
    random by --seed.

    Raises:
        ConfigError, FolderError: the source does not fit the model.
    """
    if checkpoint is None and config.checkpoint.load is not None:
        checkpoint, _ = require_newest(config.checkpoint.load)
    if checkpoint is not None:
        load_weights(chunks, config.model, checkpoint.path)
    elif hf_folder is not None:
        load_hf(chunks, config.model, hf_folder)
    else:
        initialize_weights(chunks, config.model, config.run.seed)
