"""The README's code runs as it is printed."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_python_example_runs_and_is_short():
    (code,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(code.splitlines()) <= 25
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    logprobs = [float(line.split()[-1]) for line in done.stdout.splitlines()]
    assert len(logprobs) == 3 and logprobs[-1] > logprobs[0], "the rewarded response became likelier"


def test_files_and_flags_that_it_names_exist():
    from megatron_longstraw.config import SETTINGS

    starters = r"(?:bash|python|(?:torchrun|sbatch) [^`\n]*?)"
    for path in re.findall(rf"{starters} ((?:launch|tests|tools|examples)/\S+\.(?:sh|py|sbatch))", README):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"launch/\w+/\S+\.toml", README):
        assert (ROOT / path).exists(), path
    known = {flag for setting in SETTINGS.values() for flag in setting.flags}
    named = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", README))
    others = {"--help", "--config", "--json", "--nproc-per-node", "--no-build-isolation", "--slow", "--logdir"}
    others |= {"--nnodes", "--ntasks-per-node", "--dry-run", "--world-size", "--rdzv-backend", "--rdzv-endpoint"}
    others |= {"--nodes", "--gpus-per-node", "--time", "--partition", "--signal-minutes"}
    others |= {"--container-image", "--container-mounts"}
    tools = {"--response-tokens", "--prompt-tokens", "--schedules", "--repeats", "--group-size", "--hf", "--hf-origin"}
    planner = {"--hardware", "--rates", "--solve"}
    assert not named - known - others - tools - planner
