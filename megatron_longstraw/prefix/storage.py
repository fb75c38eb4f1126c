"""How the tensors of a prefix state are kept: in what form (a codec) and in which memory (a place).

A kept tensor [B, K, tokens, D] is one or two planes [B, K, tokens, W]: its values, and for fp8 their scales. A codec
turns values into planes and back; `DeviceMemory` and `HostMemory` hold planes of any kind. Everyone reads what a codec
gives back, the chunk that wrote it included.
"""
from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass
from typing import Iterator, Sequence

import torch
from torch import Tensor

from megatron_longstraw.attention.merge import accumulation_dtype

Plane = tuple[tuple[int, ...], torch.dtype]
"""Shape [B, K, tokens, W] and dtype."""


@dataclass(frozen=True)
class StoredBytes:
    """Bytes of tensors by the memory they are in."""

    device: int = 0
    host: int = 0

    def __add__(self, other: StoredBytes) -> StoredBytes:
        return StoredBytes(self.device + other.device, self.host + other.host)

    def __sub__(self, other: StoredBytes) -> StoredBytes:
        return StoredBytes(self.device - other.device, self.host - other.host)

    @property
    def total(self) -> int:
        return self.device + self.host


@dataclass(frozen=True)
class Storage:
    """How one capture is kept; by default as computed, on the device."""

    kv_dtype: str | None = None
    """bf16 or fp8; None: the dtype that attention computes in."""
    grad_dtype: str = "fp32"
    """fp32 (float64 for float64 inputs) or bf16: of dK, dV, and so of the sums over their readers."""
    device_bytes: int | None = None
    """Bytes of K, V, dK, dV that may stay on the device, first come, first served: K, V of whole layers, then their
    gradients, which nothing but the backward reads. None: no limit."""
    out_on_host: bool = False
    """Kept (out, lse) wait for their backward in host memory."""

    @property
    def codec(self) -> Cast | Float8:
        return Float8() if self.kv_dtype == "fp8" else Cast(torch.bfloat16 if self.kv_dtype == "bf16" else None)

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.grad_dtype == "bf16" else accumulation_dtype(dtype)


class DeviceBudget:
    """What is left of the bytes that may stay on the device."""

    def __init__(self, left: int | None):
        self.left = left

    def take(self, num_bytes: int) -> bool:
        """Whether that many fit; if so they are taken."""
        if self.left is None:
            return True
        if num_bytes > self.left:
            return False
        self.left -= num_bytes
        return True


# -- codecs ----------------------------------------------------------------------------------------------------


class Cast:
    """Values in another dtype (None: in their own)."""

    def __init__(self, dtype: torch.dtype | None):
        self.dtype = dtype

    def planes(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plane]:
        return [(shape, self.dtype or dtype)]

    def encode(self, x: Tensor) -> list[Tensor]:
        return [x.to(self.dtype or x.dtype)]

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        (values,) = planes
        return values.to(dtype)


class Float8:
    """float8_e4m3fn codes and one float32 scale for each row of D values (each token and head): amax / 448, which
    puts the largest value of a row on the largest code. A row with a NaN or an infinity comes back as NaN."""

    def planes(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Plane]:
        return [(shape, torch.float8_e4m3fn), ((*shape[:-1], 1), torch.float32)]

    def encode(self, x: Tensor) -> list[Tensor]:
        x = x.float()
        # The floor serves rows of zeros, and of values so small that their scale would round to too small a one.
        floor = torch.finfo(torch.float32).tiny
        scale = (x.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max).clamp_min(floor)
        return [(x / scale).to(torch.float8_e4m3fn), scale]

    def decode(self, planes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        codes, scale = planes
        return codes.to(accumulation_dtype(dtype)).mul_(scale).to(dtype)


# -- places ----------------------------------------------------------------------------------------------------


def plane_bytes(planes: Sequence[Plane]) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in planes)


class DeviceMemory:
    """Planes of equal [B, K, tokens] where attention computes, each allocated once; reading gives views of them."""

    def __init__(self, planes: Sequence[Plane], device: torch.device, zero: bool = False):
        make = torch.zeros if zero else torch.empty
        self.planes = [make(shape, dtype=dtype, device=device) for shape, dtype in planes]
        self.nbytes = StoredBytes(device=plane_bytes(planes))

    def write(self, begin: int, parts: Sequence[Tensor]) -> None:
        """Store one part [B, K, t, W] per plane at tokens [begin, begin + t)."""
        for plane, part in zip(self.planes, parts):
            plane[:, :, begin : begin + part.shape[2]] = part

    def add(self, begin: int, parts: Sequence[Tensor]) -> None:
        """Add to what is stored there."""
        for plane, part in zip(self.planes, parts):
            plane[:, :, begin : begin + part.shape[2]] += part

    def blocks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[list[Tensor]]:
        """The planes' tokens [begin, end) of each range; valid until the next is asked for."""
        for begin, end in ranges:
            yield [plane[:, :, begin:end] for plane in self.planes]

    def read(self, begin: int, end: int) -> list[Tensor]:
        return next(self.blocks([(begin, end)]))


class HostMemory:
    """The same in host memory, pinned where the device is a GPU. Copies run beside the computation: each block of
    `blocks` is brought to the device while the one before it is used, in two buffers, and what is written or added
    is not waited for.

    Planes are kept in cells of `cell_tokens` tokens: torch rounds a pinned allocation up to a power of two, which may
    double a long one, and cells of one size are used again by the next capture.
    """

    def __init__(self, planes: Sequence[Plane], device: torch.device, cell_tokens: int, zero: bool = False):
        self.device, self.cell_tokens = device, cell_tokens
        self.copies = _copies_of(device)
        make = functools.partial(torch.zeros if zero else torch.empty, pin_memory=device.type == "cuda")
        self.planes = [
            [
                make((*shape[:2], min(cell_tokens, shape[2] - begin), shape[3]), dtype=dtype)
                for begin in range(0, shape[2], cell_tokens)
            ]
            for shape, dtype in planes
        ]
        self._like = planes
        self.nbytes = StoredBytes(host=plane_bytes(planes))

    def write(self, begin: int, parts: Sequence[Tensor]) -> None:
        parts = [part.contiguous() for part in parts]
        with self.copies.beside():
            self._store(begin, parts)
        self.copies.hold(parts)

    def add(self, begin: int, parts: Sequence[Tensor]) -> None:
        tokens = parts[0].shape[2]
        with self.copies.beside():
            sums = self._load(self._buffers(tokens), begin, begin + tokens)
            for total, part in zip(sums, parts):
                total += part
            self._store(begin, sums)
        self.copies.hold(parts)

    def blocks(self, ranges: Sequence[tuple[int, int]]) -> Iterator[list[Tensor]]:
        # Buffers belong to the computation's stream: it is the last to use them.
        longest = max(end - begin for begin, end in ranges)
        buffers = [self._buffers(longest) for _ in ranges[:2]]

        def stage(number: int):
            with self.copies.beside():
                return self._load(buffers[number % 2], *ranges[number]), self.copies.mark()

        ahead = stage(0)
        for number in range(1, len(ranges) + 1):
            current, arrived = ahead
            ahead = stage(number) if number < len(ranges) else None
            self.copies.wait(arrived)
            yield current

    def read(self, begin: int, end: int) -> list[Tensor]:
        return next(self.blocks([(begin, end)]))

    def _buffers(self, tokens: int) -> list[Tensor]:
        """Flat space on the device for that many tokens of each plane."""
        return [
            torch.empty(math.prod(shape[:2]) * tokens * shape[3], dtype=dtype, device=self.device)
            for shape, dtype in self._like
        ]

    def _load(self, buffers: list[Tensor], begin: int, end: int) -> list[Tensor]:
        loaded = []
        for (shape, _), plane, buffer in zip(self._like, self.planes, buffers):
            shape = (*shape[:2], end - begin, shape[3])
            part = buffer[: math.prod(shape)].view(shape)
            for cell, rows in self._cut(plane, begin, end):
                _copy(part[:, :, rows], cell)
            loaded.append(part)
        return loaded

    def _store(self, begin: int, parts: Sequence[Tensor]) -> None:
        for plane, part in zip(self.planes, parts):
            for cell, rows in self._cut(plane, begin, begin + part.shape[2]):
                _copy(cell, part[:, :, rows])

    def _cut(self, plane: list[Tensor], begin: int, end: int) -> Iterator[tuple[Tensor, slice]]:
        """The cells of tokens [begin, end), cut to them, and which of these tokens each one holds."""
        at = begin
        while at < end:
            number, inside = divmod(at, self.cell_tokens)
            stop = min(end, (number + 1) * self.cell_tokens)
            yield plane[number][:, :, inside : inside + stop - at], slice(at - begin, stop - begin)
            at = stop


def _copy(target: Tensor, source: Tensor) -> None:
    """Between host and device in contiguous runs: torch takes others through unpinned memory and waits for them."""
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    by_head = (x.view(-1, *x.shape[2:]) for x in (target, source))
    for target_rows, source_rows in zip(*by_head):
        target_rows.copy_(source_rows, non_blocking=True)


class _Copies:
    """The order between a GPU's computation and the stream of its copies; without a GPU all runs in program order."""

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: tuple[torch.cuda.Event | None, Sequence[Tensor]] = (None, ())

    @contextlib.contextmanager
    def beside(self):
        """What is queued inside runs after all that the computation has queued so far, without holding it up."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """The point that the copies have reached when all queued so far are done."""
        return None if self.stream is None else self.stream.record_event()

    def wait(self, point: torch.cuda.Event | None) -> None:
        """The computation goes on when the copies have reached the point."""
        if point is not None:
            torch.cuda.current_stream(self.device).wait_event(point)

    def hold(self, tensors: Sequence[Tensor]) -> None:
        """Keep the computation's tensors until the copies queued so far have read them. It waits for those held
        before, so that they never pile up."""
        if self.stream is None:
            return
        before, self._held = self._held, (self.mark(), tensors)
        self.wait(before[0])


@functools.cache
def _copies_of(device: torch.device) -> _Copies:
    """One stream per device."""
    return _Copies(device)
