"""What one operator may import of another, and that the shared floor imports none."""

import ast
from pathlib import Path

import bevatron.kernels

ROOT = Path(bevatron.kernels.__file__).parent
DATA_STRUCTURES = {"graph.csr"}
"""Packages that are no operators."""


def imports(path):
    """(module, name) of everything a file imports from kernels, without the common prefix."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bevatron.kernels."):
            for alias in node.names:
                yield node.module.removeprefix("bevatron.kernels."), alias.name


def exported(module):
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return ast.literal_eval(node.value)
    return []


def is_public(module, name):
    _, operator, *rest = module.split(".")
    if rest == ["reference"] or name == operator:
        return True
    return rest in ([], ["triton"]) and name in exported(module)


def test_an_operator_imports_only_what_another_exports():
    private = []
    for path in ROOT.glob("*/*/*.py"):
        own = ".".join(path.relative_to(ROOT).parts[:2])
        for module, name in imports(path):
            operator = ".".join(module.split(".")[:2])
            is_operator = "." in operator and ROOT.joinpath(*operator.split(".")).is_dir()
            if not is_operator or operator in DATA_STRUCTURES | {own}:
                continue
            if not is_public(module, name):
                private.append(f"{path.relative_to(ROOT)}: {name} of {module}")
    assert not private


def test_the_shared_floor_imports_no_family():
    found = {
        (path.name, module)
        for path in (ROOT / "shared").glob("*.py")
        for module, _ in imports(path)
        if not module.startswith("shared")
    }
    assert not found


def test_the_rule_sees_what_it_forbids():
    assert is_public("pair.layer_norm.triton", "launch_forward")
    assert is_public("pair.layer_norm.triton", "layer_norm")
    assert not is_public("pair.layer_norm.triton", "normalise")
    assert not is_public("pair.layer_norm.triton_kernels", "forward_kernel")
