"""config.json: read with every doubt reported, and the part of it that all decoder families share."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_longstraw.convert.rope import read_rope

CONFIG = "config.json"
_MISSING = object()


class HFConfig:
    """A config.json and what was found wrong with it so far."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self.problems: list[str] = []
        self.warnings: list[str] = []

    @classmethod
    def read(cls, path: Path) -> HFConfig:
        """Raises:
        ValueError: the file cannot be read or holds no JSON object.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path.name} cannot be read ({error.strerror})") from None
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path.name} is not JSON ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{path.name} holds {type(values).__name__}, need a JSON object")
        return cls(values)

    def number(self, *names: str, default: Any = _MISSING, kind: type = int) -> Any:
        """The first of these keys that is set, as a number above 0; the default (or a problem) if none is."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            fits = type(value) is int or (kind is float and type(value) is float)
            if not fits or not 0 < value < 2**63:
                self.problems.append(f"{CONFIG}: got {name} {value!r}, need a {'whole ' if kind is int else ''}number above 0")
                return kind(1)
            return kind(value)
        if default is _MISSING:
            self.problems.append(f"{CONFIG}: has no {' or '.join(names)}")
            return kind(1)
        return default

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None or type(value) is bool:
            return default if value is None else value
        self.problems.append(f"{CONFIG}: got {name} {value!r}, need true or false")
        return default

    def accept(self, name: str, accepted: tuple, why: str) -> None:
        """A key that may be absent, or have one of these values."""
        value = self.values.get(name)
        if value is not None and value not in accepted:
            self.problems.append(f"{CONFIG}: got {name} {value!r}, need {accepted[0]!r}: {why}")

    def sliding_window(self, on: bool) -> int | None:
        """Tokens that a position sees, if some layer is windowed."""
        layers = self.values.get("layer_types")
        if isinstance(layers, list):
            others = {str(kind) for kind in layers} - {"full_attention", "sliding_attention"}
            if others:
                self.problems.append(f"{CONFIG}: got layer_types with {', '.join(sorted(others))}, need full_attention")
            on = "sliding_attention" in layers
        if not on or self.values.get("sliding_window") is None:
            return None
        return self.number("sliding_window")


def decoder_settings(hf: HFConfig) -> dict[str, Any]:
    """Fields of `ModelConfig` that every Llama-like family spells alike."""
    hf.accept("hidden_act", ("silu",), "the MLP is a SwiGLU")
    hf.accept("attention_dropout", (0, 0.0), "the prompt runs again for its gradient and must give the same numbers")
    if hf.values.get("quantization_config") is not None:
        hf.problems.append(f"{CONFIG}: has quantization_config; need weights in float32, bfloat16 or float16")
    heads = hf.number("num_attention_heads")
    hidden_size = hf.number("hidden_size")
    return {
        "num_layers": hf.number("num_hidden_layers"),
        "hidden_size": hidden_size,
        "ffn_hidden_size": hf.number("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": hf.number("num_key_value_heads", default=heads),
        "kv_channels": hf.number("head_dim", default=max(1, hidden_size // heads)),
        "vocab_size": hf.number("vocab_size"),
        "norm_epsilon": hf.number("rms_norm_eps", kind=float),
        "init_method_std": hf.number("initializer_range", kind=float, default=0.02),
        "untie_embeddings_and_output_weights": not hf.flag("tie_word_embeddings"),
        **read_rope(hf),
    }
