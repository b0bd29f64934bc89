"""The operators in `torch.ops.bevatron`: captured graphs and exported programs name them."""

import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import bevatron.kernels

SCHEMAS = Path(__file__).parent / "operator_schemas.txt"


def registered():
    """Schemas of all custom operators, after importing every module of Triton kernels."""
    pytest.importorskip("triton")
    for module in pkgutil.walk_packages(bevatron.kernels.__path__, "bevatron.kernels."):
        if module.name.rpartition(".")[2].startswith("triton"):
            importlib.import_module(module.name)
    names = torch._C._dispatch_get_all_op_names()
    # Doctests and tests declare operators of their own.
    ours = sorted(n for n in names if n.startswith("bevatron::") and "test_" not in n)
    return [str(torch._C._get_schema(name, "")) for name in ours]


def test_names_and_schemas_of_all_custom_operators_do_not_change():
    assert "\n".join(registered()) + "\n" == SCHEMAS.read_text(encoding="utf-8")
