"""How bytes, work and seconds of branch replay grow with ranks and with the length of the prompt.

    python tools/scaling.py --json scaling.json --plots docs/pictures

    longest    the longest context at the bytes per rank that one rank needs for --positions, on 1, 2, 4, 8 ranks
    ranks      one context (--positions) on 1, 2, 4, 8 ranks
    lengths    4,096 tokens and its doubles up to eight times --positions, on one rank

Every number is of one exact gradient step of a tiny model with a group of 8, measured by long_context_receipt.py. On one
machine ranks share the cores, so that seconds say nothing about speed on more of them: bytes, pairs of tokens and bytes
from other ranks do.
"""
from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from long_context_receipt import DEFAULTS

from megatron_longstraw.config import positive_int

CHUNK_TOKENS = 2048
SHORTEST = 4096
PASSES = ("capture", "replay_8", "prefix_backward")
"""The calls of a step with a group of 8."""


def receipt(ranks: int, positions: int) -> dict:
    """Measured by so many processes of one thread each."""
    tool = Path(__file__).with_name("long_context_receipt.py")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "receipt.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(tool)]
        command += ["--positions", str(positions), "--prefix-chunk-tokens", str(CHUNK_TOKENS), "--no-check"]
        done = subprocess.run(
            [*command, "--json", str(path)],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tool.parents[1]), "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        return row(json.loads(path.read_text()))


def row(measured: dict) -> dict:
    """What a table says of one receipt."""
    phases = [measured["phases"][name] for name in PASSES]
    work = [phase["work"] for phase in phases]
    result = {
        "ranks": measured["ranks"],
        "positions": measured["positions"],
        "bytes_per_rank": measured["step"]["peak_bytes"]["8"],
        "seconds": {name: phase["seconds"] for name, phase in zip(PASSES, phases)},
        "attention_pairs": sum(w["attention_pairs"] + w["attention_backward_pairs"] for w in work),
        "matmul_flops": sum(w["matmul_flops"] for w in work),
        "received_bytes": sum(w["received_bytes"] for w in work),
    }
    print(json.dumps(result), file=sys.stderr, flush=True)
    return result


def longest_contexts(ranks: list[int], positions: int) -> list[dict]:
    """Measured rows, by number of ranks; the first has `positions`, and its bytes per rank are the limit of all."""
    rows = [receipt(ranks[0], positions)]
    for count in ranks[1:]:
        rows.append(_longest_context(count, count * positions // ranks[0], rows[0]["bytes_per_rank"]))
    for measured in rows:
        measured["of_linear"] = measured["positions"] * ranks[0] / (measured["ranks"] * positions)
    return rows


def _longest_context(ranks: int, about: int, budget: int) -> dict:
    """Bytes grow steadily with the context, so two lengths tell a third that should just fit; if it does not, it tells
    a better one."""
    short, longer = receipt(ranks, about // 4), receipt(ranks, about // 2)
    while True:
        slope = (longer["bytes_per_rank"] - short["bytes_per_rank"]) / (longer["positions"] - short["positions"])
        fits = int(longer["positions"] + (budget - longer["bytes_per_rank"]) / slope)
        # Whole chunks, the last of which is not cut short.
        found = receipt(ranks, fits - (fits - DEFAULTS["max_response_length"] - 1) % CHUNK_TOKENS)
        if found["bytes_per_rank"] <= budget:
            return found
        short, longer = longer, found


def plot(result: dict, folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    ranks = [r["ranks"] for r in result["longest"]]
    left.plot(ranks, [r["positions"] / 1024 for r in result["longest"]], "o-", label="measured")
    left.plot(ranks, [n / ranks[0] * result["longest"][0]["positions"] / 1024 for n in ranks], "k:", label="linear")
    left.set(xlabel="ranks", ylabel="longest context, 1,024 tokens", title="at equal bytes per rank", xticks=ranks)
    lengths = [r["positions"] for r in result["lengths"]]
    for name, key in (("attention, pairs", "attention_pairs"), ("the rest, FLOPs", "matmul_flops")):
        values = [r[key] for r in result["lengths"]]
        right.loglog(lengths, [value / values[0] for value in values], "o-", label=name)
    seconds = [sum(r["seconds"].values()) for r in result["lengths"]]
    right.loglog(lengths, [value / seconds[0] for value in seconds], "s--", label="seconds")
    right.set(xlabel="tokens", ylabel=f"relative to {lengths[0]:,} tokens", title="cost of one exact step, one rank")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "scaling.png", dpi=100)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=positive_int, default=16384, help="tokens of the prompt and one response")
    parser.add_argument("--ranks", type=lambda text: [int(x) for x in text.split(",")], default=[1, 2, 4, 8])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--plots", type=Path, help="folder for scaling.png (needs the extra: logging)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    lengths = [SHORTEST]
    while lengths[-1] < 8 * args.positions:
        lengths.append(2 * lengths[-1])
    result = {
        "longest": longest_contexts(args.ranks, args.positions),
        "ranks": [receipt(count, args.positions) for count in args.ranks],
        "lengths": [receipt(1, length) for length in lengths],
    }
    args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.plots:
        plot(result, args.plots)


if __name__ == "__main__":
    main()
