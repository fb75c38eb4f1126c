"""Rotary settings in the layouts of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters).

Read both ways, because a missing theta silently means 10000 to code that knows only one of them.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_longstraw.config import ModelConfig
    from megatron_longstraw.convert.hf_config import HFConfig

SETTINGS = (
    "position_embedding_type",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "yarn_rotary_scaling_factor",
    "yarn_original_max_position_embeddings",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_mscale",
    "yarn_mscale_all_dim",
    "max_position_embeddings",
)
"""Fields of `ModelConfig` that a run may set otherwise than its model folder (to lengthen the context)."""
_UNSUPPORTED = {
    "dynamic": "its frequencies depend on the length, so the prompt's state would depend on what follows",
    "longrope": "its frequencies depend on the length, so the prompt's state would depend on what follows",
}


def read_rope(hf: HFConfig) -> dict[str, Any]:
    """The fields of SETTINGS that a config.json sets."""
    rope = _parameters(hf)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    settings: dict[str, Any] = {"max_position_embeddings": hf.number("max_position_embeddings")}
    theta = _theta(hf, rope)
    if theta is not None:
        settings["rotary_base"] = theta
    percent = rope.get("partial_rotary_factor", hf.values.get("partial_rotary_factor"))
    if percent is not None:
        settings["rotary_percent"] = _number(hf, "partial_rotary_factor", percent)
    if kind == "default":
        pass
    elif kind == "linear":
        settings["rotary_seq_len_interpolation_factor"] = _number(hf, "factor", rope.get("factor"))
    elif kind == "llama3":
        settings["use_rope_scaling"] = True
        settings["rope_scaling_factor"] = _number(hf, "factor", rope.get("factor"))
        for name in ("low_freq_factor", "high_freq_factor"):
            settings[f"rope_scaling_{name}"] = _number(hf, name, rope.get(name))
        settings["rope_scaling_original_max_position_embeddings"] = _original_length(hf, rope)
    elif kind == "yarn":
        settings |= _yarn(hf, rope)
    else:
        known = "default, linear, llama3 or yarn"
        hf.problems.append(f"config.json: got rope_type {kind!r}, need {known}" + _because(_UNSUPPORTED.get(kind)))
    return settings


def _parameters(hf: HFConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):  # the newer layout wins
        value = hf.values.get(name)
        if value is None:
            continue
        if not isinstance(value, dict) or any(isinstance(item, dict) for item in value.values()):
            hf.problems.append(f"config.json: got {name} {value!r}, need one table of rotary settings for all layers")
            continue
        if rope and {**rope, **value} != {**value, **rope}:
            hf.warnings.append(f"config.json: rope_scaling {rope} and rope_parameters {value} disagree; took the latter")
        rope = {**rope, **value}
    return rope


def _theta(hf: HFConfig, rope: dict[str, Any]) -> float | None:
    """None where config.json does not say; 10000 would be a guess."""
    nested, top = rope.get("rope_theta"), hf.values.get("rope_theta")
    if nested is not None and top is not None and nested != top:
        hf.warnings.append(f"config.json: rope_theta is {nested} in rope_parameters and {top} outside; took {nested}")
    theta = top if nested is None else nested
    return None if theta is None else _number(hf, "rope_theta", theta)


def _original_length(hf: HFConfig, rope: dict[str, Any]) -> int:
    value = rope.get("original_max_position_embeddings")
    return int(_number(hf, "original_max_position_embeddings", hf.values.get("max_position_embeddings") if value is None else value))


def _yarn(hf: HFConfig, rope: dict[str, Any]) -> dict[str, Any]:
    if rope.get("truncate") not in (None, True):
        hf.problems.append("config.json: got truncate false under yarn, need true: Megatron rounds the correction range")
    original = _original_length(hf, rope)
    factor = rope.get("factor")
    if factor is None:
        factor = hf.number("max_position_embeddings") / original
    factor = _number(hf, "factor", factor)
    mscale, mscale_all_dim = rope.get("mscale") or 0.0, rope.get("mscale_all_dim") or 0.0
    if not (mscale and mscale_all_dim):
        mscale, mscale_all_dim = 1.0, 0.0
    attention_factor = rope.get("attention_factor")
    if attention_factor is not None and factor > 1.0:
        # Megatron computes 0.1 * mscale * log(factor) + 1.
        mscale = (_number(hf, "attention_factor", attention_factor) - 1.0) / (0.1 * math.log(factor))
        mscale_all_dim = 0.0
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": original,
        "yarn_beta_fast": _number(hf, "beta_fast", rope.get("beta_fast") or 32.0),
        "yarn_beta_slow": _number(hf, "beta_slow", rope.get("beta_slow") or 1.0),
        "yarn_mscale": float(mscale),
        "yarn_mscale_all_dim": float(mscale_all_dim),
        "max_position_embeddings": max(hf.number("max_position_embeddings"), int(factor * original)),
    }


def _number(hf: HFConfig, name: str, value: Any) -> float:
    if type(value) in (int, float) and 0 < value < math.inf:
        return float(value)
    hf.problems.append(f"config.json: got {name} {value!r} among the rotary settings, need a number above 0")
    return 1.0


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def rope_tables(model: ModelConfig) -> dict[str, Any]:
    """`rope_parameters`, as transformers 5 writes them, of a resolved model."""
    table: dict[str, Any] = {"rope_theta": model.rotary_base, "rope_type": "default"}
    if model.rotary_percent != 1.0:
        table["partial_rotary_factor"] = model.rotary_percent
    if model.position_embedding_type == "yarn":
        factor = model.yarn_rotary_scaling_factor
        table |= {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": model.yarn_original_max_position_embeddings,
            "beta_fast": model.yarn_beta_fast,
            "beta_slow": model.yarn_beta_slow,
            "attention_factor": _mscale(factor, model.yarn_mscale) / _mscale(factor, model.yarn_mscale_all_dim),
        }
    elif model.use_rope_scaling:
        table |= {
            "rope_type": "llama3",
            "factor": model.rope_scaling_factor,
            "low_freq_factor": model.rope_scaling_low_freq_factor,
            "high_freq_factor": model.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": model.rope_scaling_original_max_position_embeddings,
        }
    elif model.rotary_seq_len_interpolation_factor != 1.0:
        table |= {"rope_type": "linear", "factor": model.rotary_seq_len_interpolation_factor}
    return table


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def write_rope(values: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """A config.json with the model's rotary settings, in each layout that it had."""
    table, result = rope_tables(model), dict(values)
    result["rope_parameters"] = table
    if "rope_theta" in values:
        result["rope_theta"] = model.rotary_base
    if "rope_scaling" in values:
        scaling = {name: value for name, value in table.items() if name not in ("rope_theta", "partial_rotary_factor")}
        result["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    result["max_position_embeddings"] = model.max_position_embeddings
    return result
