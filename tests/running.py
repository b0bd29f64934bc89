"""How the suite runs: drawn examples, the order of tests, processes that a test ends.

Examples that hypothesis draws follow from the test alone, so that a run repeats the last one.
``--hypothesis-profile random`` draws others, and ten times as many; ``--shuffle SEED`` runs
modules, and the tests of each, in random order (``make test-long`` does both).
"""

import gc
import os
import random
import subprocess
import sys

import pytest
from hypothesis import settings

MORE_EXAMPLES = 10
OWN_PROCESS = "BEVATRON_TEST_IN_A_PROCESS_OF_ITS_OWN"

settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("random", deadline=None, print_blob=True)
settings.load_profile("fixed")


def pytest_addoption(parser):
    parser.addoption("--shuffle", metavar="SEED", help="run modules, and their tests, shuffled")


def pytest_report_header(config):
    lines = [f"examples: {settings.get_current_profile_name()}"]
    if config.getoption("shuffle"):
        lines.append(f"order: --shuffle {config.getoption('shuffle')}")
    return lines


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if settings.get_current_profile_name() == "random":
        _draw_more(items)
    if config.getoption("shuffle"):
        items[:] = shuffled(items, config.getoption("shuffle"))


def pytest_collection_finish():
    """Spare the collector what lives to the end; otherwise it takes a tenth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def shuffled(items, seed):
    """Put modules into random order and the tests of each, so that fixtures are made once."""
    modules = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    order = random.Random(seed)
    chosen = order.sample(sorted(modules), len(modules))
    return [item for name in chosen for item in order.sample(modules[name], len(modules[name]))]


def _draw_more(items):
    """Draw ten times the examples that each test, or the profile, asks for."""
    for test in {getattr(item.obj, "__func__", item.obj) for item in items if _is_drawn(item)}:
        asked = getattr(test, "_hypothesis_internal_use_settings", None) or settings.default
        more = settings(asked, max_examples=MORE_EXAMPLES * asked.max_examples)
        test._hypothesis_internal_use_settings = more


def _is_drawn(item):
    return getattr(getattr(item, "obj", None), "is_hypothesis_test", False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """End a process whose GPU a test has broken, in which all later tests would fail.

    Of several workers another takes the place of this one and goes on behind the test.
    """
    failed_before = item.session.testsfailed
    done = yield
    if item.session.testsfailed > failed_before and _gpu_is_broken():
        if hasattr(item.config, "workerinput"):
            os._exit(1)
        pytest.exit(f"the GPU of this process failed in {item.nodeid}", returncode=1)
    return done


def _gpu_is_broken():
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test marked ``own_process`` in another pytest: it may end its process or its GPU."""
    marker = pyfuncitem.get_closest_marker("own_process")
    if marker is None or not marker.kwargs.get("when", True) or OWN_PROCESS in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(
        command,
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, OWN_PROCESS: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"in a process of its own:\n{done.stdout}", pytrace=False)
    if " skipped" in done.stdout.splitlines()[-1]:
        pytest.skip("skipped in a process of its own")
    return True
