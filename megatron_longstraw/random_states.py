"""The global random generators of Python, NumPy and torch. Training draws nothing from them; a user's reward function
may, and finds them after a stop as it would have without."""
from __future__ import annotations

import base64
import json
import random
from typing import Any

import numpy as np
import torch


def get_states() -> dict[str, Any]:
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])


def to_json(states: dict[str, Any]) -> str:
    name, keys, *rest = states["numpy"]
    torch_bytes = base64.b64encode(states["torch"].numpy().tobytes()).decode()
    return json.dumps({"python": states["python"], "numpy": [name, keys.tolist(), *rest], "torch": torch_bytes})


def from_json(text: str) -> dict[str, Any]:
    states = json.loads(text)
    version, keys, gauss = states["python"]
    name, numpy_keys, *rest = states["numpy"]
    torch_bytes = bytearray(base64.b64decode(states["torch"]))
    return {
        "python": (version, tuple(keys), gauss),
        "numpy": (name, np.array(numpy_keys, dtype=np.uint32), *rest),
        "torch": torch.frombuffer(torch_bytes, dtype=torch.uint8),
    }
