"""Imports go one way, and the core loads no extras."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

# A file imports from its own level and from those before it. `topr` itself is topr/__init__.py.
LEVELS = [
    ["topr", "io"],
    ["advantages"],
    ["losses", "batching", "optim"],
    ["policy"],
    ["run"],
    ["sampling", "trajectories"],
    ["tasks"],
    ["evaluation"],
    ["datamodule"],
    ["module", "callbacks"],
    ["iterate"],
]
EXTRAS = ["callbacks", "io.commands", "iterate", "optim", "evaluation.live"]
EXTRAS += ["evaluation.benchmarks", "evaluation.metrics", "evaluation.report"]
EXTRAS += ["run.checkpoints", "run.folder"]
EXTRAS += ["sampling.local", "sampling.server", "tasks.arithmetic", "tasks.equivalence"]
EXTRAS += ["tasks.gsm8k", "tasks.math", "tasks.verifier"]
EXTRAS += ["trajectories.curate", "trajectories.fields", "trajectories.importing"]
EXTRAS += ["trajectories.rows"]
TOPR = ROOT / "topr"


def module_name(path) -> str:
    """`losses.topr` for topr/losses/topr.py, `losses` for topr/losses/__init__.py."""
    parts = path.relative_to(TOPR).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__") or "topr"


FILES = {module_name(path): path for path in sorted(TOPR.rglob("*.py"))}


def imports(source: str) -> set[str]:
    """The project's modules that a file imports anywhere, also inside functions, but not those
    that only annotations need."""
    names = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:  # what is imported from a package may be a module
                inside = f"{node.module}.{alias.name}"
                is_module = inside.removeprefix("topr.") in FILES
                names.add(inside if is_module else node.module)
    ours = {name for name in names if name.split(".")[0] in ("topr", "train", "evaluate")}
    return {name.removeprefix("topr.") for name in ours}


def upward(name: str, source: str) -> list[str]:
    """What a file imports although it comes later in the levels, or is an entry point."""
    level = {part: number for number, parts in enumerate(LEVELS) for part in parts}
    own = level[name.split(".")[0]]
    return [other for other in imports(source) if level.get(other.split(".")[0], 99) > own]


def test_imports_go_one_way_without_a_circle():
    assert upward("losses.topr", "def f():\n    from topr.policy import Policy") == ["policy"]
    assert upward("policy.model", "from topr import module\nimport train") != []
    graph = {}
    for name, path in FILES.items():
        if name.endswith("__main__"):  # a command of its package, which does not import it
            continue
        assert upward(name, path.read_text()) == [], name
        graph[name] = imports(path.read_text())
    list(TopologicalSorter(graph).static_order())


@pytest.mark.slow
def test_the_core_loads_no_extras():
    code = "import sys, topr.module, topr.datamodule; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded = {name.removeprefix("topr.") for name in done.stdout.split()}
    assert {"module", "datamodule", "policy.model", "losses.base"} <= loaded
    assert {*EXTRAS} <= {*FILES}
    assert loaded & {*EXTRAS, "peft", "datasets", "pandas", "math_verify"} == set()
