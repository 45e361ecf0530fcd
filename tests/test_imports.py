"""Imports go one way, and every package says what belongs in it."""

import ast
from graphlib import TopologicalSorter

import pytest
from conftest import ROOT

LEVELS = [  # a file imports from its own level and from those before it
    ["io", "distributed"],
    ["losses", "batching", "optim"],
    ["policy"],
    ["trajectories", "sampling"],
    ["tasks"],
    ["evaluation"],
    ["datamodule", "callbacks"],
    ["module"],
    ["iterate", "reproduce"],
]
COMMANDS = ["__main__"]  # they may import anything but the entry points
TOPR = ROOT / "topr"


def module_name(path) -> str:
    """`losses.topr` for topr/losses/topr.py, `losses` for topr/losses/__init__.py."""
    return (
        ".".join(path.relative_to(TOPR).with_suffix("").parts)
        .removesuffix("__init__")
        .removesuffix(".")
    )


FILES = {module_name(path): path for path in sorted(TOPR.rglob("*.py"))}


def imports(source: str) -> set[str]:
    """The project's modules that a file imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            # what is imported from a package may be a module
            names |= {
                name if name.removeprefix("topr.") in FILES else node.module for name in inside
            }
    return {
        name.removeprefix("topr.")
        for name in names
        if name.split(".")[0] in ("topr", "train", "evaluate")
    }


def upward(name: str, source: str) -> list[str]:
    """What a file imports although it comes later in the levels, or is an entry point."""
    found = imports(source)
    if any(name.startswith(command) or name.endswith(command) for command in COMMANDS):
        return [other for other in found if other in ("train", "evaluate")]
    level = {part: number for number, parts in enumerate(LEVELS) for part in parts}
    return [
        other
        for other in found
        if level.get(other.split(".")[0], len(LEVELS)) > level[name.split(".")[0]]
    ]


def test_imports_go_one_way():
    assert {
        name: found
        for name, path in FILES.items()
        if name and (found := upward(name, path.read_text()))
    } == {}


def test_an_import_that_goes_up_is_found():
    assert upward("losses.topr", "def f():\n    from topr.policy import Policy") == ["policy"]
    assert upward("policy.model", "from topr import module") == ["module"]
    assert upward("module", "import train") == ["train"]
    assert (
        upward("policy.model", "from topr.losses import TOPR\nfrom topr.policy import one_pass")
        == []
    )


def test_imports_make_no_circle():
    # a command of a package is not imported by it
    graph = {
        name: imports(path.read_text())
        for name, path in FILES.items()
        if not name.endswith("__main__")
    }
    list(TopologicalSorter(graph).static_order())


@pytest.mark.parametrize(
    "name", [name for name, path in FILES.items() if path.name == "__init__.py"]
)
def test_every_package_says_what_belongs_in_it(name):
    assert ast.get_docstring(ast.parse(FILES[name].read_text()))
