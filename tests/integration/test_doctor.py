"""The doctor on this machine, and on machines that lack or have what this one does not."""
import configparser
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from megatron_longstraw import doctor

ROOT = Path(__file__).parents[2]


def run_doctor(*options, path: Path | None = None, **environ):
    paths = [str(ROOT), *([str(path)] if path else [])]
    return subprocess.run(
        [sys.executable, *options, "-m", "megatron_longstraw.doctor"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environ},
    )


def package(folder: Path, name: str, text: str = "", *subfolders: str) -> Path:
    for part in ("", *subfolders):
        (folder / name / part).mkdir(parents=True, exist_ok=True)
        (folder / name / part / "__init__.py").write_text(text)
    return folder


def test_this_machine_can_train():
    done = run_doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "training can run" and len(lines) <= 40 and max(map(len, lines)) <= 160
    shown = {line[2:22].strip(): line[22:] for line in lines if line[2] != " "}
    assert shown["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert shown["torch"].startswith(torch.__version__)
    assert shown["megatron-core"] == metadata.version("megatron-core")
    assert ("gpus" in shown) != torch.cuda.is_available()
    assert {"between ranks", "transformer engine", "flash-attn", "apex", "slurm", "host", "disk"} <= set(shown)


def test_without_anything_installed_it_says_what_is_missing_and_how_to_get_it():
    done = run_doctor("-S")
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.endswith("training cannot run: torch, packages\n")
    assert "pip install -c constraints.txt" in done.stdout and "megatron-core, numpy" in done.stdout


def test_the_apex_of_pypi_is_not_taken_for_nvidias(tmp_path):
    done = run_doctor(path=package(tmp_path / "pypi", "apex", "", "lib"))
    assert "the wrong one in " in done.stdout and "pip uninstall apex" in done.stdout
    assert done.returncode == 0
    nvidia = package(tmp_path / "nvidia", "apex", "", "multi_tensor_apply")
    assert "NVIDIA's, without its CUDA extensions" in run_doctor(path=nvidia).stdout
    (nvidia / "amp_C.py").write_text("")
    assert "NVIDIA's, with its CUDA extensions" in run_doctor(path=nvidia).stdout


def test_transformer_engine_needs_a_gpu_and_is_asked_for_its_recipes(tmp_path, monkeypatch):
    assert "needs a CUDA device" in doctor._transformer_engine(cuda=False).missing
    engine = "def is_fp8_available(): return True\ndef is_fp8_block_scaling_available(): return False\n"
    monkeypatch.syspath_prepend(package(tmp_path, "transformer_engine", engine, "pytorch"))
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    assert "not usable" in doctor._transformer_engine(cuda=False).text
    assert doctor._transformer_engine(cuda=True).text.endswith("FP8 recipes here: delayed, tensorwise")
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "transformer_engine/pytorch/__init__.py").write_text("import no_such_library\n")
    finding = doctor._transformer_engine(cuda=True)
    assert "cannot be imported: No module named 'no_such_library'" in finding.text and not finding.stops_training


def test_a_folder_that_cannot_be_written_stops_training(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    assert doctor._disk(tmp_path).stops_training


def test_slurm_job_is_named():
    assert "inside job 7, nodes n[1-2]" in run_doctor(SLURM_JOB_ID="7", SLURM_JOB_NODELIST="n[1-2]").stdout


def test_it_asks_for_what_setup_cfg_declares():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    declared = [Requirement(line) for line in parser["options"]["install_requires"].split("\n")[1:]]
    assert {canonicalize_name(item.name) for item in declared} == set(doctor.REQUIRED)
    for item in declared:
        if item.name in doctor.RANGES:
            low, below = doctor.RANGES[item.name]
            (upper,) = [specifier.version for specifier in item.specifier if specifier.operator == "<"]
            (lower,) = [specifier.version for specifier in item.specifier if specifier.operator == ">="]
            assert tuple(map(int, lower.split(".")[:2])) == low and tuple(map(int, upper.split(".")[:2])) == below


@pytest.mark.parametrize(
    ("version", "fits"), [("2.13.0+cpu", True), ("2.10.1", False), ("2.15.0", False), ("3.0.0", False)]
)
def test_a_torch_outside_the_range_stops_training(version, fits):
    assert doctor._in_range("torch", version).stops_training is not fits
