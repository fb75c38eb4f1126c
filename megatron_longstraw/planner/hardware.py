"""What devices do per second: vendors' figures with their sources, and which share of them to expect.

Nothing here was measured on these devices. The shares:

    matmul     cuBLAS on large bfloat16 products; H20 has a seventh of H100's tensor throughput behind the same memory
               and reaches more of it
    attention  the kernels used are PyTorch's (FlashAttention-2), which keep 35 % of an H100 busy (FlashAttention-3,
               arXiv 2407.08608, abstract). That is 2.6 TFLOP/s for each of 132 multiprocessors: more than the tensor
               units of an H20 give (148 / 78), and the same again is assumed of B200's 148. A backward takes 2.5
               forwards
    memory, link, host   streams, large messages over NVLink, pinned copies over PCIe
"""
from __future__ import annotations

import json
import math
from bisect import bisect
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from megatron_longstraw.config import ConfigError

ATTENTION_BACKWARD = 2.5
"""Forwards that a backward of attention costs: five products instead of two, on five for two."""
GPUS_PER_NODE = 8
_NETWORK = 50e9
"""Bytes per second and GPU between nodes: one 400 Gb/s adapter for each, as in DGX H100 (its user guide)."""
_HOST_MEMORY = 25e9
"""Bytes per second of host memory for each of 8 ranks that run Adam there: an assumption."""
_HOST_BYTES = 200 * 10**9
"""For each of 8 ranks: of 2 TB (DGX H100's datasheet), what other things leave."""
_LAUNCH_S = 5e-6
"""Seconds between two kernels that Python starts: an assumption."""
_KERNELS = {"forward": 75, "backward": 130, "micro_batch": 40}
"""That a layer starts forward and backward, and what a micro-batch has beside its layers, counted on the CPU."""
_LIKE = {"score": "replay", "full": "prefix_backward"}
"""Calls that a calibration does not run, by one that it does."""
ADAM_BYTES = 7 * 4 + 2
"""Of a parameter, in one pass: read its gradient, moments and master weight, write all but the gradient."""


@dataclass(frozen=True)
class Curve:
    """Seconds of a kind of work by its amount: measured points, or one rate for any amount."""

    points: tuple[tuple[float, float], ...]
    """(amount, seconds), growing."""

    @classmethod
    def of_rate(cls, per_s: float) -> Curve:
        return cls(((1.0, 1.0 / per_s),))

    def seconds(self, amount: float) -> float:
        """Between points straight in logarithms; beyond them at the rate of the nearest."""
        if amount <= 0:
            return 0.0
        amounts = [point[0] for point in self.points]
        if amount <= amounts[0] or amount >= amounts[-1]:
            nearest, seconds = self.points[0 if amount <= amounts[0] else -1]
            return seconds * amount / nearest
        (low, low_s), (high, high_s) = self.points[bisect(amounts, amount) - 1 : bisect(amounts, amount) + 1]
        share = math.log(amount / low) / math.log(high / low)
        return math.exp(math.log(low_s) * (1 - share) + math.log(high_s) * share)


@dataclass(frozen=True)
class Hardware:
    """One device: its memory, and the seconds of what it does."""

    name: str
    source: str
    memory_bytes: int
    """As nvidia-smi shows it."""
    matmul: Curve
    """By floating-point operations of one product, in the model's precision."""
    matmul_fp8: Curve
    attention: Curve
    """By floating-point operations of one forward."""
    attention_backward: Curve
    attention_read: Curve
    """By bytes of K and V: what attention of hardly any queries takes."""
    memory: Curve
    """By bytes read and written."""
    link: Curve
    """By bytes sent to ranks of the same node."""
    network: Curve
    host: Curve
    """By bytes copied from or to host memory."""
    host_memory: Curve
    adam: Curve
    """By parameters."""
    layer_forward_s: float
    """Seconds to start the operators of a layer, whatever they work on."""
    layer_backward_s: float
    micro_batch_s: float
    """Of a micro-batch, beside its layers."""
    layer_token_s: float
    """Of a layer, for one token of all responses."""
    token_s: float
    """Of such a token, beside the layers."""
    asynchronous: bool
    """Operators start while earlier ones still run."""
    host_bytes: int
    """Of host memory, for one rank."""
    corrections: dict[str, dict[str, float]] = field(default_factory=dict)
    """What calls took over what their rates say: by call, of communication by kind and of "work" for all else."""
    usable_share: float = 0.9
    """Of the memory: the rest is for the CUDA context, communication buffers and fragmentation."""

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * self.usable_share)

    def corrected(self, call: str, cost: Counter[str]) -> Counter[str]:
        """Seconds by kind as `corrections` have them; calls without any go by the one that is most like them."""
        factors = self.corrections.get(call) or self.corrections.get(_LIKE.get(call, ""), {})
        return Counter({kind: seconds * factors.get(kind, factors.get("work", 1.0)) for kind, seconds in cost.items()})


def _gpu(
    name: str, source: str, *, memory_mib: int, bf16: float, fp8: float, memory: float, link: float, host: float,
    matmul_share: float, attention_share: float,
) -> Hardware:  # fmt: skip
    """Rates in TFLOP/s (dense) and TB/s (memory) or GB/s per direction (link, host)."""
    attention = attention_share * bf16 * 1e12
    return Hardware(
        name=name,
        source=source,
        memory_bytes=memory_mib * 2**20,
        matmul=Curve.of_rate(matmul_share * bf16 * 1e12),
        matmul_fp8=Curve.of_rate(matmul_share * fp8 * 1e12),
        attention=Curve.of_rate(attention),
        attention_backward=Curve.of_rate(attention),
        attention_read=Curve.of_rate(0.85 * memory * 1e12),
        memory=Curve.of_rate(0.85 * memory * 1e12),
        link=Curve.of_rate(0.75 * link * 1e9),
        network=Curve.of_rate(0.75 * _NETWORK),
        host=Curve.of_rate(0.8 * host * 1e9),
        host_memory=Curve.of_rate(_HOST_MEMORY),
        adam=Curve.of_rate(0.85 * memory * 1e12 / ADAM_BYTES),
        **{f"layer_{way}_s": _KERNELS[way] * _LAUNCH_S for way in ("forward", "backward")},
        micro_batch_s=_KERNELS["micro_batch"] * _LAUNCH_S,
        layer_token_s=_KERNELS["forward"] * _LAUNCH_S,
        token_s=2 * _KERNELS["micro_batch"] * _LAUNCH_S,
        asynchronous=True,
        host_bytes=_HOST_BYTES,
    )


_H20 = dict(bf16=148, fp8=296, memory=4.0, link=450, host=64, matmul_share=0.8, attention_share=0.75)
_HOPPER = dict(bf16=989.4, fp8=1978.9, link=450, host=64, matmul_share=0.65, attention_share=0.35)
HARDWARE = {
    "h20-96": _gpu("H20 96 GB", "NVIDIA H20 product brief", memory_mib=97871, **_H20),
    "h20-141": _gpu("H20 141 GB", "NVIDIA H20 product brief; its memory's rate taken as the 96 GB part's",
                    memory_mib=143771, **_H20),
    "h100": _gpu("H100 SXM", "NVIDIA H100 datasheet, without sparsity: https://www.nvidia.com/en-us/data-center/h100/",
                 memory_mib=81559, memory=3.35, **_HOPPER),
    "h200": _gpu("H200 SXM", "NVIDIA H200 datasheet, without sparsity: https://www.nvidia.com/en-us/data-center/h200/",
                 memory_mib=143771, memory=4.8, **_HOPPER),
    "b200": _gpu("B200", "NVIDIA HGX B200 datasheet, an eighth, without sparsity: "
                 "https://www.nvidia.com/en-us/data-center/hgx/", memory_mib=183359, bf16=2250, fp8=4500, memory=7.7,
                 link=900, host=64, matmul_share=0.65, attention_share=0.17),
}  # fmt: skip
"""By the name that --hardware takes; the CPU's figures come from tools/calibrate.py."""
NAMES = (*HARDWARE, "cpu")


def hardware_of(name: str, rates_file: str | None = None) -> Hardware:
    """Raises:
    ConfigError: no such device, or the CPU's rates are missing or not what tools/calibrate.py writes.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if name != "cpu":
        raise ConfigError([f"got --hardware {name}, need one of {', '.join(NAMES)}"])
    if rates_file is None:
        raise ConfigError(["got --hardware cpu without --rates; need what python tools/calibrate.py FILE writes"])
    try:
        found = json.loads(Path(rates_file).read_text())
        curves = {kind: Curve(tuple(map(tuple, found[kind]))) for kind in CALIBRATED}
        facts = {name: found[name] for name in (*CALIBRATED_FACTS, "corrections")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError([f"got --rates {rates_file}: {error}; need a file that tools/calibrate.py wrote"]) from None
    return Hardware(
        name="CPU", source=f"measured: {rates_file}", **facts, **curves, matmul_fp8=curves["matmul"],
        network=curves["link"], host=curves["memory"], host_memory=curves["memory"], asynchronous=False,
        host_bytes=facts["memory_bytes"],
    )  # fmt: skip


CALIBRATED_FACTS = ("memory_bytes", "layer_forward_s", "layer_backward_s", "micro_batch_s", "layer_token_s", "token_s")
CALIBRATED = ("matmul", "attention", "attention_backward", "attention_read", "memory", "link", "adam")
"""Curves of a rates file. attention_backward counts the operations of a forward times ATTENTION_BACKWARD."""
