"""The structure of the house: who may import whom, no cycles, a docstring in every module."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests")
SERVICES = [package for package in PACKAGES if package not in ("contracts", "infra")]
ALLOWED = {"contracts": set(), "infra": {"contracts"}} | {service: {"contracts", "infra"} for service in SERVICES}

# What the contracts may stand on: types, arrays, the wire format and pure parts of the standard library.
CONTRACTS_MAY_USE = {
    "__future__", "ast", "collections", "dataclasses", "enum", "functools", "hashlib", "inspect", "io", "itertools",
    "math", "msgpack", "msgspec", "numpy", "re", "tokenize", "typing",
}  # fmt: skip


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(module: str, *, types: bool = True) -> Iterator[str]:
    """Full names of what a module imports anywhere, in functions too; without `types`, not under TYPE_CHECKING."""
    pending: list[ast.AST] = [parsed(module)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and not types and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
            continue
        pending.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
                kept = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in MODULES else base


def test_the_layers_are_there():
    assert {"contracts", "infra"} <= set(PACKAGES) and SERVICES


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_lies_below_it(package):
    allowed = ALLOWED[package] | {package}
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        if module.split(".")[0] == package
        for name in imports(module)
        if name.split(".")[0] in PACKAGES and name.split(".")[0] not in allowed
    ]
    assert not wrong


def test_the_contracts_need_neither_torch_nor_a_network():
    used = {name.split(".")[0] for module in MODULES if module.startswith("contracts") for name in imports(module)}
    assert used - {"contracts"} <= CONTRACTS_MAY_USE


def room_of(module: str) -> str:
    """A folder of a package, or a file beside them: what one sees of a service at first."""
    return ".".join(module.split(".")[:2])


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Names that lead back to the first; empty = there is none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for other in sorted(graph[name]):
                if found := visit(other, [*path, name]):
                    return found
            done.add(name)
        return []

    return next((found for name in graph if (found := visit(name, []))), [])


def test_no_module_imports_itself_through_others():
    graph = {module: {name for name in imports(module, types=False) if name in MODULES} for module in MODULES}
    assert not circle(graph)


def test_no_room_imports_itself_through_others():
    graph: dict[str, set[str]] = {room_of(module): set() for module in MODULES}
    for module in MODULES:
        others = {room_of(name) for name in imports(module, types=False) if name in MODULES}
        graph[room_of(module)] |= others - {room_of(module)}
    assert not circle(graph)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is(module):
    assert ast.get_docstring(parsed(module)), f"{MODULES[module]} has no docstring"
