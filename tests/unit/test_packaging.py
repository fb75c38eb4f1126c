"""What installs: declared ranges, tested versions, and the scripts that make the environment."""
import ast
import configparser
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from megatron_longstraw import __version__
from megatron_longstraw.config import load_config, validate

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "megatron_longstraw"
SCRIPTS = sorted([*ROOT.glob("launch/*.sh"), *ROOT.glob("tests/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / ".ci/run"])
DISTRIBUTION_OF = {"megatron": "megatron-core", "PIL": "pillow"}
"""Where the import is called otherwise than what is installed."""
TESTED_EXTRAS = ("test", "logging")
"""The other extras need a GPU or are compared with on request, and bring versions of their own."""


def parse_requirements(lines):
    return {canonicalize_name(item.name): item for item in map(Requirement, lines.split("\n")[1:])}


@pytest.fixture(scope="module")
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


@pytest.fixture(scope="module")
def required(setup_cfg):
    return parse_requirements(setup_cfg["options"]["install_requires"])


@pytest.fixture(scope="module")
def extras(setup_cfg):
    return {name: parse_requirements(lines) for name, lines in setup_cfg["options.extras_require"].items()}


@pytest.fixture(scope="module")
def pins():
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    return {canonicalize_name(item.name): item for item in map(Requirement, filter(None, lines))}


def test_extras(extras):
    assert set(extras) == {"te", "test", "logging", "wandb", "peers", "vllm"}


def test_pins_are_exact_public_versions(pins):
    for item in pins.values():
        (specifier,) = item.specifier
        assert specifier.operator == "==", item
        assert Version(specifier.version).local is None, f"{item}: a build of one machine"


def test_ranges_hold_the_pins(required, extras, pins):
    for declared in (required, *extras.values()):
        for name, item in declared.items():
            assert {specifier.operator for specifier in item.specifier} & {">=", "=="}, f"{item} has no lower bound"
            if name in pins:
                (pin,) = pins[name].specifier
                assert pin.version in item.specifier, f"{item} excludes the tested {pins[name]}"


def test_pins_are_what_the_declared_packages_need(required, extras, pins):
    """One missing would install another version each month; one too many would outlive its reason."""
    wanted = [*required.values(), *(item for extra in TESTED_EXTRAS for item in extras[extra].values())]
    assert set(pins) == everything_needed(wanted)


def everything_needed(wanted):
    """Names of the distributions under these requirements, by what is installed here."""
    todo, seen = [(item, extra) for item in wanted for extra in ("", *item.extras)], set()
    while todo:
        item, extra = todo.pop()
        key = (canonicalize_name(item.name), extra)
        # PyTorch's CUDA build pins its own libraries.
        if key in seen or key[0].startswith(("nvidia-", "cuda-", "triton")):
            continue
        seen.add(key)
        for line in metadata.requires(item.name) or []:
            below = Requirement(line)
            if below.marker is None or below.marker.evaluate({"extra": extra}):
                todo += [(below, part) for part in ("", *below.extras)]
    return {name for name, _ in seen}


def test_supported_pythons(setup_cfg):
    supported = SpecifierSet(setup_cfg["options"]["python_requires"])
    answers = [f"3.{minor}" in supported for minor in (10, 11, 12, 13)]
    assert answers == [False, True, True, False]


def third_party_imports(path, own):
    """(name, at import time) of what a file imports from elsewhere; imports in functions may be optional."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.Lambda)) for node in ast.walk(f)}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module]
        for name in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - own:
            yield canonicalize_name(DISTRIBUTION_OF.get(name, name)), id(node) not in inside


def test_the_package_declares_what_it_imports(required, extras):
    optional = set().union(*extras.values())
    for path in PACKAGE.rglob("*.py"):
        for name, always in third_party_imports(path, {PACKAGE.name}):
            assert name in required or (not always and name in optional), f"{path.relative_to(ROOT)} imports {name}"


def test_tools_examples_and_tests_declare_what_they_import(required, extras):
    declared = {*required, *extras["test"]}
    own = {PACKAGE.name, "examples", "tests", *(path.stem for path in ROOT.glob("tools/*.py"))}
    for folder in ("tools", "examples", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for name, always in third_party_imports(path, own):
                optional = not always and name in extras["peers"]
                assert name in declared or optional, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_scripts_parse(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_quickstart_is_valid_with_every_rank_in_context_parallel(ranks):
    file = ROOT / "examples/needle/quickstart.toml"
    assert validate(load_config([file], {"context_parallel_size": ranks}), world_size=ranks) == []
    assert load_config([file]).parallel.context_parallel_size == 2


FAKE_PYTHON = f"""#!{sys.executable}
import os, shutil, sys
from pathlib import Path
log = Path({{log!r}})
match sys.argv[1:]:
    case ["-c", code]:
        exec(code)
    case ["--version"]:
        print("Python of the test")
    case ["-m", "venv", "--clear", folder]:
        shutil.rmtree(folder, ignore_errors=True)
        (Path(folder) / "bin").mkdir(parents=True)
        shutil.copy(sys.argv[0], Path(folder) / "bin/python")
        log.open("a").write("venv\\n")
    case ["-m", "pip", "--version"]:
        pass
    case ["-m", "pip", "install", *rest]:
        leaked = os.environ.get("PYTHONPATH", "nothing")
        log.open("a").write(f"install {{{{rest[-1]}}}} with {{{{leaked}}}} leaked\\n")
        sys.exit((Path({{root!r}}) / "no-network").exists())
    case other:
        sys.exit(f"unexpected {{{{other}}}}")
"""


class Checkout:
    """The files that venv.sh reads, and a Python that writes down what it is asked to do."""

    def __init__(self, root):
        self.root, self.log, self.python = root, root / "log", root / "fake_python"
        for name in ("launch/venv.sh", "setup.cfg", "pyproject.toml", "constraints.txt"):
            (root / name).parent.mkdir(exist_ok=True)
            (root / name).write_text((ROOT / name).read_text())
        self.python.write_text(FAKE_PYTHON.format(log=str(self.log), root=str(root)))
        self.python.chmod(0o755)

    def use_venv(self, extras, **environment):
        """What Python was asked to do, and the finished process."""
        self.log.write_text("")
        done = subprocess.run(
            ["bash", "-c", f'set -euo pipefail; source "{self.root}/launch/venv.sh"; use_venv {extras}'],
            env={**os.environ, "PYTHON": str(self.python), "PYTHONPATH": "/another/checkout", **environment},
            capture_output=True,
            text=True,
        )
        return self.log.read_text().splitlines(), done


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "a checkout").mkdir()
    return Checkout(tmp_path / "a checkout")


def test_venv_installs_once_per_extra_and_again_after_a_change(checkout):
    def installed(extras):
        return f"install {checkout.root}[{extras}] with nothing leaked"

    calls, done = checkout.use_venv("test,logging")
    assert calls == ["venv", installed("test,logging")]
    assert len(done.stdout.splitlines()) == 2 and done.stderr == ""
    assert checkout.use_venv("logging")[0] == checkout.use_venv("test,logging")[0] == []
    assert checkout.use_venv("logging,te")[0] == [installed("te")]
    (checkout.root / "constraints.txt").write_text("numpy==2.0.0\n")
    assert checkout.use_venv("logging")[0] == [installed("logging")]


def test_venv_tries_again_after_a_failed_install(checkout):
    (checkout.root / "no-network").touch()
    assert checkout.use_venv("test")[1].returncode == 1
    (checkout.root / "no-network").unlink()
    calls, done = checkout.use_venv("test")
    assert done.returncode == 0
    assert calls == [f"install {checkout.root}[test] with nothing leaked"]


def test_venv_is_made_anew_when_its_python_is_gone(checkout):
    checkout.use_venv("test")
    (checkout.root / ".venv/bin/python").unlink()
    assert checkout.use_venv("test")[0] == ["venv", f"install {checkout.root}[test] with nothing leaked"]


def test_venv_refuses_a_python_that_does_not_suit(checkout):
    calls, done = checkout.use_venv("test", PYTHON="/bin/false")
    assert (calls, done.returncode) == ([], 1)
    assert done.stderr == "PYTHON=/bin/false is not Python 3.11 or 3.12\n"
    # Without it, names on PATH that only fail must not be taken for Python.
    (checkout.root / "bin").mkdir()
    for name in ("python3.11", "python3.12", "python3"):
        (checkout.root / "bin" / name).symlink_to("/bin/false")
    path = f"{checkout.root / 'bin'}:{os.environ['PATH']}"
    calls, done = checkout.use_venv("test", PYTHON="", PATH=path)
    assert (calls, done.returncode) == ([], 1)
    assert "PYTHON=/path/to/python" in done.stderr


def test_version_is_a_public_one():
    assert str(Version(__version__)) == __version__
