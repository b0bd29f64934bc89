"""Which tests `make check` runs for a changed file."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
from changed_tests import matching_tests

SOURCES = {
    Path(name): text
    for name, text in {
        "tests/kernels/pair/test_swiglu.py": "",
        "tests/kernels/pair/test_swiglu_triton.py": "",
        "tests/kernels/graph/test_csr.py": "",
        "tests/recipes/gpspp/test_predict.py": "",
        "tests/data/store/test_store.py": "from bevatron.data.store import shards, stage",
        "tests/train/test_loop.py": "from tiny import make_run",
        "tests/test_fixtures.py": "import bevatron.kernels.graph.csr.launch as launch",
        "tests/test_docs.py": "",
        "tests/benchmarks/test_kernels.py": "",
    }.items()
}


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("tests/kernels/graph/test_csr.py", ["kernels/graph/test_csr"]),
        (
            "src/bevatron/kernels/pair/swiglu/triton_products.py",
            ["kernels/pair/test_swiglu", "kernels/pair/test_swiglu_triton"],
        ),
        ("src/bevatron/kernels/graph/csr/launch.py", ["kernels/graph/test_csr", "test_fixtures"]),
        ("src/bevatron/recipes/gpspp/predict.py", ["recipes/gpspp/test_predict"]),
        ("src/bevatron/data/store/stage.py", ["data/store/test_store"]),
        ("tests/train/tiny.py", ["train/test_loop"]),
        ("benchmarks/kernels/runner.py", ["benchmarks/test_kernels"]),
        ("docs/mace.md", ["test_docs"]),
        ("Makefile", []),
    ],
)
def test_tests_mirror_a_changed_file_or_name_its_module(changed, tests):
    found = [path for path in matching_tests([Path(changed)], SOURCES) if path.parts[0] == "tests"]
    assert found == [Path(f"tests/{name}.py") for name in tests]


def test_doctests_of_a_changed_module_come_along():
    assert matching_tests([Path("src/bevatron/files.py")], SOURCES) == [
        Path("src/bevatron/files.py")
    ]
    assert not matching_tests([Path("src/bevatron/kernels/optim/triton.py")], SOURCES)
