"""Imports go one way, megatron stays in one folder, errors are not swallowed, and what others made is never unpickled.

Read from the source, so that imports inside functions and under TYPE_CHECKING count too. A new top-level module needs
a place in the tables below.
"""
import ast
import subprocess
import sys
from pathlib import Path

import pytest

NAME = "megatron_longstraw"
PACKAGE = Path(__file__).parents[2] / NAME

BASE = ("config", "types", "metering", "interruption", "watchdog", "user_errors", "agent", "disk", "random_states")
"""Import nothing of the package."""
SPINE = (
    "attention", "context_parallel", "prefix", "mcore", "rollout", "gradients", "algorithm", "nonfinite", "sources", "api", "train",
    "launch",
)  # fmt: skip
"""Each may import those before it, and BASE."""
LEAVES = ("objectives", "rewards", "data", "convert", "planner", "run_log", "agreement", "slurm", "doctor")
"""Import BASE only; used from rollout on (convert: from mcore on)."""
LEAF_USERS = {leaf: SPINE[SPINE.index("rollout") :] for leaf in LEAVES} | {"convert": SPINE[SPINE.index("mcore") :]}
WITHOUT_TORCH = ("config", "types", "planner", "slurm", "user_errors", "disk")
FORBIDDEN = ("megatron.training", "apex")
"""megatron.training is not in the wheel; apex needs a CUDA build."""
UNTRUSTED = ("convert", "data", "rollout", "rewards")
"""Read models, prompts and rollouts that others made."""
TOOLS_OF_UNTRUSTED = ("validate_data.py", "data_report.py")
RUN_CODE = (
    "pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "runpy", "torch.load", "torch.jit.load",
    "numpy.load", "np.load", "pandas.read_pickle", "pd.read_pickle", "eval", "exec", "compile",
)  # fmt: skip
"""Modules and functions that run what a file says."""
HTTP = (
    "urllib.request", "urllib3", "http", "requests", "httpx", "aiohttp", "httplib2", "pycurl", "websocket", "websockets",
    "tornado", "grpc", "xmlrpc", "ftplib", "huggingface_hub",
)  # fmt: skip
"""Nothing here speaks to servers. What ever does needs certificates checked and tokens kept out of logs, and one place
where both are tested."""
MAY_CATCH_EVERYTHING = ("rewards/loading.py", "data/tokenizers.py")
"""A user's reward function may raise anything, and a library may raise bare Exception; the line must say so in a
comment."""


def sources(package):
    return sorted(package.rglob("*.py"))


def part_of(path, package):
    """Top-level module a file belongs to: config/rules.py -> config, train.py -> train."""
    relative = path.relative_to(package)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported_modules(path, package):
    """(line, absolute dotted name) of everything a file imports, `from a import b` as a.b."""
    tree = ast.parse(path.read_text())
    here = (package.name, *path.relative_to(package).parts[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def allowed(importer, imported):
    if importer == imported:
        return True
    if importer in BASE:
        return False
    if imported in BASE:
        return importer in SPINE or importer in LEAVES
    if imported in LEAVES:
        return importer in LEAF_USERS[imported]
    return importer in SPINE and imported in SPINE[: SPINE.index(importer)]


def violations(package):
    """One line per breach of the rules in the package at this path."""
    found = []
    for path in sources(package):
        own, where = part_of(path, package), path.relative_to(package).as_posix()
        if own != "__init__" and own not in BASE + SPINE + LEAVES:
            found.append(f"{where}: {own} has no place in the layers; give it one in {Path(__file__).name}")
        for line, module in imported_modules(path, package):
            root, *rest = module.split(".")
            if root == package.name and rest and not allowed(own, rest[0]):
                found.append(f"{where}:{line}: {own} imports {rest[0]}")
            if root == "megatron" and own != "mcore":
                found.append(f"{where}:{line}: megatron outside mcore/")
            if root in ("torch", "megatron") and own in WITHOUT_TORCH:
                found.append(f"{where}:{line}: {own} imports {root}")
            if within(module, FORBIDDEN):
                found.append(f"{where}:{line}: {module} is not available everywhere")
            if within(module, HTTP):
                found.append(f"{where}:{line}: {module} speaks to servers")
        found += swallowed_errors(path, where)
        if own in UNTRUSTED:
            found += runs_code_of_files(path, where)
    return found


def runs_code_of_files(path, where):
    """Names of RUN_CODE that a file imports or uses, and leave for a model's own code."""
    used = [(node.lineno, ast.unparse(node)) for node in ast.walk(ast.parse(path.read_text())) if dotted(node)]
    for line, name in {*used, *imported_modules(path, path.parent)}:
        if any(name == banned or name.startswith(banned + ".") for banned in RUN_CODE):
            yield f"{where}:{line}: {name} runs what a file says"
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
            yield f"{where}:{node.value.lineno}: trust_remote_code runs what a file says"


def dotted(node):
    """Whether this is a name, or a name with attributes: torch.load."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def within(module, names):
    return any(module == name or module.startswith(name + ".") for name in names)


def swallowed_errors(path, where):
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler):
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            broad = any(item is None or getattr(item, "id", "") in ("Exception", "BaseException") for item in caught)
            excused = where in MAY_CATCH_EVERYTHING and "#" in text.splitlines()[node.lineno - 1]
            if broad and not excused:
                yield f"{where}:{node.lineno}: catches every error"


def test_the_package_keeps_its_layers():
    """A breach makes pieces that are testable alone depend on everything, and soon on each other."""
    assert len(sources(PACKAGE)) > 20
    assert violations(PACKAGE) == []


def test_tools_that_read_what_others_made_do_not_run_it():
    for name in TOOLS_OF_UNTRUSTED:
        assert list(runs_code_of_files(PACKAGE.parent / "tools" / name, name)) == []


def test_config_planner_and_launch_load_without_torch():
    """The planner, --help and config errors must answer at once, on machines without torch too."""
    code = (
        f"import sys, {NAME}.config, {NAME}.types, {NAME}.planner.__main__, {NAME}.launch, {NAME}.doctor\n"
        "heavy = {'torch', 'megatron', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr


PLANTED = {
    "prefix imports what is above it": (
        "prefix/store.py",
        "from megatron_longstraw.mcore import calls",
        "prefix imports mcore",
    ),
    "inside a function": (
        "attention/x.py",
        "def f():\n    import megatron_longstraw.prefix.state",
        "attention imports prefix",
    ),
    "relative": ("attention/x.py", "from ..context_parallel import layout", "attention imports context_parallel"),
    "from the package itself": ("mcore/x.py", "from megatron_longstraw import train as t", "mcore imports train"),
    "by name": (
        "mcore/x.py",
        "import importlib\nimportlib.import_module('megatron_longstraw.rollout')",
        "mcore imports rollout",
    ),
    "a leaf imports another": (
        "rewards/x.py",
        "from megatron_longstraw.objectives import metrics",
        "rewards imports objectives",
    ),
    "a leaf imports the spine": ("objectives/x.py", "from ..mcore import calls", "objectives imports mcore"),
    "the spine imports a leaf too early": (
        "mcore/x.py",
        "from megatron_longstraw.objectives import metrics",
        "mcore imports objectives",
    ),
    "base imports base": ("types.py", "from megatron_longstraw.config import Config", "types imports config"),
    "megatron elsewhere": ("rollout/x.py", "from megatron.core import parallel_state", "megatron outside mcore/"),
    "megatron.training": (
        "mcore/x.py",
        "from megatron.training import get_args",
        "megatron.training.get_args is not available",
    ),
    "apex": ("mcore/x.py", "import apex.optimizers", "apex.optimizers is not available"),
    "an HTTP client": ("data/x.py", "import requests", "requests speaks to servers"),
    "an HTTP client of Python": ("rewards/x.py", "from urllib import request", "urllib.request speaks to servers"),
    "an HTTP client by name": (
        "rollout/x.py",
        "def f():\n    import importlib\n    importlib.import_module('http.client')",
        "http.client speaks to servers",
    ),
    "torch in config": ("config/x.py", "import torch", "config imports torch"),
    "torch in types": ("types.py", "from torch import Tensor", "types imports torch"),
    "unknown module": ("helpers.py", "", "helpers has no place"),
    "except Exception": ("mcore/x.py", "try:\n    pass\nexcept Exception:\n    pass", "x.py:3: catches every error"),
    "bare except": ("mcore/x.py", "try:\n    pass\nexcept:\n    pass", "x.py:3: catches every error"),
    "among others": (
        "mcore/x.py",
        "try:\n    pass\nexcept (ValueError, BaseException):\n    pass",
        "catches every error",
    ),
    "pickle of data": ("data/x.py", "import pickle", "pickle runs what a file says"),
    "inside a function of convert": ("convert/x.py", "def f(p):\n    from torch import load", "torch.load runs"),
    "torch.load": ("convert/x.py", "import torch\ndef f(p):\n    return torch.load(p)", "x.py:3: torch.load runs"),
    "eval": ("rewards/x.py", "def f(text):\n    return eval(text)", "eval runs what a file says"),
    "allow_pickle": ("rollout/x.py", "import numpy as np\nf = np.load", "np.load runs what a file says"),
    "a model's own code": ("data/x.py", "f(trust_remote_code=True)", "trust_remote_code runs what a file says"),
    "without a comment": ("rewards/loading.py", "try:\n    pass\nexcept Exception:\n    pass", "catches every error"),
}
PERMITTED = {
    "downwards": ("algorithm.py", "from megatron_longstraw.mcore.calls import capture"),
    "own folder": (
        "prefix/x.py",
        "from . import state\nfrom .store import PrefixStore\nfrom megatron_longstraw.prefix import y",
    ),
    "addresses": ("data/x.py", "import socket\nfrom urllib.parse import urlparse"),
    "base": ("rewards/x.py", "from ..types import Branch"),
    "leaf from above": ("train.py", "from megatron_longstraw.objectives.metrics import MetricSums"),
    "megatron in mcore": ("mcore/x.py", "from megatron.core import parallel_state"),
    "evaluation mode": ("convert/x.py", "def f(model, json, re):\n    return model.eval(), json.load, re.compile"),
    "none of a model's code": ("data/x.py", "f(trust_remote_code=False)"),
    "with a comment": ("rewards/loading.py", "try:\n    pass\nexcept Exception:  # a user's function\n    pass"),
}


def plant(folder, file, text):
    path = folder / NAME / file
    path.parent.mkdir(parents=True)
    path.write_text(text + "\n")
    return folder / NAME


@pytest.mark.parametrize(("file", "text", "message"), PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_found(tmp_path, file, text, message):
    (found,) = violations(plant(tmp_path, file, text))
    assert message in found


@pytest.mark.parametrize(("file", "text"), PERMITTED.values(), ids=PERMITTED)
def test_permitted_import_is_not_reported(tmp_path, file, text):
    assert violations(plant(tmp_path, file, text)) == []
