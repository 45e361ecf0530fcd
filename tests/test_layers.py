"""Imports go down the layers or sideways, never up and never in a circle."""

import ast
from graphlib import TopologicalSorter

from conftest import ROOT

LAYERS = [
    {
        "io", "losses", "losses.loss", "losses.shares", "losses.tapered", "losses.clipped", "losses.groups",
        "losses.weighted", "losses.preference", "attention", "packing",
        "logprobs", "trajectories", "importing", "report", "metrics", "policy",
        "policy_files", "tokenizer", "rows", "lora", "plan",
        "sharding", "ranks", "server", "tasks.latex", "tasks.judge", "tasks.equivalence",
    },
    {
        "tasks", "tasks.task", "tasks.arithmetic", "tasks.arithmetic_verifier", "tasks.demonstrations",
        "tasks.imitation", "tasks.making", "tasks.gsm8k", "tasks.math", "tasks.verifier",
        "curation", "datamodule", "loaders", "generation", "sampling", "evaluation",
    },
    {"monitor", "module", "optim", "trainer"},
    {
        "iterate", "progress", "regimes", "laboratory", "experiments", "first_order", "study", "composition", "claims",
        "figures", "reproduce",
    },
]  # fmt: skip


def imports() -> dict[str, set[str]]:
    """The project's modules that each of them imports anywhere, those inside functions included."""
    modules = {}
    for path in (ROOT / "topr").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / "topr").with_suffix("").parts).removesuffix(".__init__")
        if name == "__init__":
            continue
        found = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "topr":
                inside = node.module.removeprefix("topr").lstrip(".")
                found |= {inside} if inside else {alias.name for alias in node.names}
            if isinstance(node, ast.Import):
                found |= {alias.name.removeprefix("topr.") for alias in node.names if alias.name.startswith("topr.")}
        modules[name] = found
    return modules


def test_every_module_has_a_layer():
    assert set(imports()) == set().union(*LAYERS)


def test_imports_go_down():
    layer = {name: i for i, names in enumerate(LAYERS) for name in names}
    assert [(name, used) for name, found in imports().items() for used in found if layer[used] > layer[name]] == []


def test_imports_make_no_circle():
    graph = imports()
    graph["trajectories"] -= {"importing", "report"}  # the command at its end, inside a function
    list(TopologicalSorter(graph).static_order())
