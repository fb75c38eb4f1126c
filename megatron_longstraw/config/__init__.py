"""Configuration: frozen dataclasses <-> flags <-> TOML. Imports no torch.

    schema.py    the sections and their fields, with defaults and help
    settings.py  what one field accepts, and how a text or a TOML value becomes one
    parsing.py   defaults < TOML files left to right < flags; and back to TOML
    rules.py, prefix_rules.py
                 what has to hold between fields, and for a world of ranks; of the shared prompt
"""
from megatron_longstraw.config.parsing import (
    add_config_flags,
    changed_settings,
    config_from_args,
    load_config,
    load_toml,
    parse_args,
    positive_int,
    to_toml,
)
from megatron_longstraw.config.rules import check, validate
from megatron_longstraw.config.schema import (
    SECTIONS,
    SETTINGS,
    AlgorithmConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrefixConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
)
from megatron_longstraw.config.settings import ConfigError, Setting, parse_bytes

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrefixConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SECTIONS",
    "SETTINGS",
    "Setting",
    "add_config_flags",
    "changed_settings",
    "check",
    "config_from_args",
    "load_config",
    "load_toml",
    "parse_args",
    "parse_bytes",
    "positive_int",
    "to_toml",
    "validate",
]
