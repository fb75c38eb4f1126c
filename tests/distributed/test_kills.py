"""kill -9 of a rank or of the whole job, at random moments of every phase: nothing is lost, and it is said who died.

    bash tests/faults.sh            # many kills

Each run is killed several times, in one step after the other, and goes on by the same command; at its end it must be
the run that nobody disturbed, to the bit.
"""
from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_longstraw.mcore.checkpoint_folder import candidates
from tests.helpers import TINY
from tests.kill_driver import PHASES, processes, run_job

pytestmark = pytest.mark.dist

KILLS_PER_RUN = 4
RUN_S = 200.0
"""No run may take longer; an undisturbed one needs a few seconds."""
TIMEOUT_S = 40.0
"""--distributed-timeout-minutes of the runs."""
LAYOUTS = {
    "cp2": dict(context_parallel_size=2),
    "dp2, distributed optimizer": dict(context_parallel_size=1, use_distributed_optimizer=True),
}
OPTIONS = TINY | dict(
    prompt_function=f"{__name__}:prompts",
    reward_function="tests.training_runs:noisy_score",
    train_batch_size=4,
    max_response_length=6,
    train_iters=KILLS_PER_RUN + 1,
    save_interval=1,
    distributed_timeout_minutes=TIMEOUT_S / 60,
    save="save",
    run_dir="run",
)
COMPLAINTS = re.compile(r"Traceback|Error|another rank is gone|exitcode|closing signal|died of")


class Prompts:
    def prompts(self, step, num_prompts):
        from tests.helpers import random_groups

        return random_groups(num_prompts, [60, 45, 75, 45], [], seed=step)

    def render(self, token_ids):
        return "".join(chr(97 + token % 26) for token in token_ids)


def prompts(config):
    return Prompts()


@dataclass
class Start:
    """One start of the command."""

    status: int
    screen: str
    ended_at: float

    @property
    def resumed_step(self) -> int:
        found = re.search(r"goes on after step (\d+)", self.screen)
        return int(found[1]) if found else 0


@dataclass
class Kill:
    phase: str
    who: int | str
    step: int
    told: dict = field(default_factory=dict)
    seconds: float = 0.0
    """Until the others had ended."""
    resumed_step: int = -1


def start(folder: Path, options: dict, plan: dict | None = None) -> Start:
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()
    ]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kill_driver"])
    process = context.Process(target=run_job, args=(folder, flags, plan or {}))
    process.start()
    try:
        process.join(RUN_S)
        ended_at = time.time()
    finally:
        for pid in [process.pid, *processes(folder)] if process.exitcode is None else ():
            os.kill(pid, signal.SIGKILL)
        process.join()
    return Start(process.exitcode, (folder / "screen.txt").read_text(errors="replace"), ended_at)


def outcome(folder: Path) -> dict[str, object]:
    """All that a run leaves and that does not depend on the clock: metrics, rollouts, the bytes of every tensor."""
    lines = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
    found: dict[str, object] = {
        "metrics": [{n: v for n, v in line.items() if not n.startswith(("timing", "perf"))} for line in lines],
        "rollouts": (folder / "run/rollouts.jsonl").read_bytes(),
    }
    for checkpoint in candidates(folder / "save"):
        assert checkpoint.damage() is None
        for path in checkpoint.path.glob("*.distcp"):
            found[f"{checkpoint.path.name}/{path.name}"] = path.read_bytes()
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """By layout: the outcome of a run that nobody disturbs, and how long its phases took, by rank."""
    made: dict[str, tuple[dict, list]] = {}

    def run(layout: str) -> tuple[dict, list]:
        if layout not in made:
            folder = tmp_path_factory.mktemp("straight")
            done = start(folder, OPTIONS | LAYOUTS[layout], {"times": str(folder / "times")})
            assert done.status == 0, done.screen
            made[layout] = outcome(folder), [json.loads((folder / f"times{rank}").read_text()) for rank in "01"]
        return made[layout]

    return run


def plan(kill: Kill, times: list, draw: random.Random, in_background: bool, told: Path) -> dict:
    """When exactly, by how long that phase took in an undisturbed run."""
    own = times[0 if kill.who == "job" else kill.who]
    # The first checkpoint that a process writes takes longest, and every start is killed in its first.
    step_like_it = 0 if kill.phase == "checkpoint write" else kill.step
    durations = [seconds for phase, step, seconds in own if (phase, step) == (kill.phase, step_like_it)]
    entry = draw.randrange(len(durations))
    background = in_background and kill.phase == "checkpoint write"
    return {
        "phase": kill.phase, "who": kill.who, "step": kill.step, "entry": entry + 1, "told": str(told),
        "after_s": draw.uniform(0.0, durations[entry] * (1.2 if background else 1.0)), "to_the_end": not background,
    }  # fmt: skip


def check_ended(kill: Kill, run: Start, folder: Path) -> None:
    """The others ended in time, the cause is the first thing on the screen, and nobody is left."""
    deadline = time.monotonic() + 2.0  # of a whole job, the last to die need a moment
    while kill.who == "job" and processes(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    kill.told = json.loads((folder / "told").read_text())
    kill.seconds = run.ended_at - kill.told["at"]
    assert run.status != 0 and kill.seconds < TIMEOUT_S, (kill, run.screen)
    assert processes(folder) == [], kill
    if kill.who != "job":
        first = next(line for line in run.screen.splitlines() if COMPLAINTS.search(line))
        assert re.match(rf"rank {kill.who} \(process \d+\) died of signal 9 \(Killed\)", first), run.screen


def run_with_kills(number: int, phases: list[str], draw: random.Random, straight, folder: Path, say) -> list[Kill]:
    layout, in_background = list(LAYOUTS)[number % 2], number // 2 % 2 == 0
    options = OPTIONS | LAYOUTS[layout] | ({"async_save": True} if in_background else {})
    expected, times = straight(layout)
    kills = [Kill(phase, draw.choice([0, 1, "job"]), step) for step, phase in enumerate(phases)]
    before: Kill | None = None
    for kill in [*kills, None]:
        what = plan(kill, times, draw, in_background, folder / "told") if kill else None
        saved = next((c.iteration for c in candidates(folder / "save") if c.damage() is None), 0)
        run = start(folder, options, what)
        if before is not None:
            before.resumed_step = run.resumed_step
            # Written in the background, a checkpoint gets its name a step later.
            assert saved == run.resumed_step >= before.told["step"] - in_background, (before, run.screen)
        if kill is None:
            assert run.status == 0, run.screen
            break
        check_ended(kill, run, folder)
        before = kill
    found = outcome(folder)
    for kill in kills:
        say(f"run {number} ({layout}{', async' if in_background else ''})  {describe(kill, found == expected)}")
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    return kills


def phases_of_runs(num_kills: int, seed: int) -> list[list[str]]:
    """By run, what is killed in its steps: every phase in turn, in an order drawn anew each time."""
    draw, order = random.Random(seed), []
    while len(order) < num_kills:
        order += draw.sample(list(PHASES), len(PHASES))
    order = order[:num_kills]
    return [order[begin : begin + KILLS_PER_RUN] for begin in range(0, num_kills, KILLS_PER_RUN)]


def describe(kill: Kill, equal: bool) -> str:
    who = kill.who if kill.who == "job" else f"rank {kill.who}"
    return (
        f"{kill.phase:<18} {who:<7} step {kill.told['step']}  others ended after {kill.seconds:5.2f} s  "
        f"resumed from {kill.resumed_step}  {'equal' if equal else 'NOT EQUAL'}"
    )


@pytest.mark.timeout(3600)
def test_kills(straight, tmp_path, capsys, request):
    seed, num_kills = request.config.getoption("--kill-seed"), request.config.getoption("--kills")

    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    say(f"\n{num_kills} kills, --kill-seed {seed}")
    kills: list[Kill] = []
    for number, phases in enumerate(phases_of_runs(num_kills, seed)):
        folder = tmp_path / str(number)
        folder.mkdir()
        kills += run_with_kills(number, phases, random.Random(f"{seed}/{number}"), straight, folder, say)
    longest = max(kill.seconds for kill in kills)
    say(f"{len(kills)} kills, all equal to the bit; the others ended after {longest:.2f} s at most ({TIMEOUT_S:.0f})")
