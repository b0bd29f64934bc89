"""Compile every Triton kernel to PTX as the kernel tests launch it, and compare two checkouts.

    python tools/ptx.py record before.json.gz --root OTHER_CHECKOUT
    python tools/ptx.py record after.json.gz --like before.json.gz
    python tools/ptx.py compare before.json.gz after.json.gz --show layer_norm.forward_kernel

Needs no GPU: it stops at PTX for sm_90. Launches are found by a hook, not by a list of files. The
kernel tests run with tensors on the CPU, but custom operators are told that they are on an H200,
so that they choose what a GPU would run. No kernel runs: a launch is noted, results are zeros, and
comparisons of tensors always hold, so that a test goes on to its next launch. Then each distinct
launch is compiled, in a process forked for it, also with bfloat16 for float16 or float32.

A kernel is known by its operator (the folder of its module) and name, a variant by the types,
constexprs, alignments and options of a launch, by position: modules and arguments may be renamed.
"""

import argparse
import ast
import base64
import contextlib
import difflib
import functools
import gzip
import hashlib
import json
import multiprocessing
import os
import pkgutil
import re
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from types import ModuleType, SimpleNamespace

SECONDS = 120
"""Time a kernel may take to compile."""

# ---------------------------------------------------------------- notes what a GPU would launch


class Launches:
    """What JIT functions were launched with; launches are not run."""

    def __init__(self):
        self.found, self.trouble, self.as_if_on_gpu = {}, {}, False

    def patch(self):
        """Note launches; run custom operators as if on a GPU; let comparisons of tensors hold."""
        import torch
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import JITFunction

        triton.knobs.runtime.interpret = False
        triton.knobs.compilation.disable_line_info = True
        self.target = GPUTarget("cuda", 90, 32)
        self.backend = make_backend(self.target)
        self.defaults = vars(self.backend.parse_options({}))
        JITFunction.run = lambda kernel, *args, **kwargs: self.note(kernel, args, kwargs)
        definition = torch._library.custom_ops.CustomOpDef
        register = definition.register_kernel

        def register_kernel(operator, device_types, function=None, /):
            def inner(function):
                register(operator, device_types)(self.on_gpu(operator._qualname, function))
                return function

            return inner if function is None else inner(function)

        definition.register_kernel = register_kernel
        torch.cuda.device.__enter__ = torch.cuda.device.__exit__ = lambda *_: None
        for module, name in (
            (torch, "equal"), (torch, "allclose"), (torch.testing, "assert_close"),
            (torch.autograd, "gradcheck"), (torch.autograd, "gradgradcheck"),
        ):  # fmt: skip
            setattr(module, name, lambda *_, **__: True)

    def note(self, kernel, args, kwargs):
        """Keep what Triton would compile for this launch."""
        from triton.runtime.jit import create_function_from_signature

        kwargs = {k: v for k, v in kwargs.items() if k not in {"grid", "warmup"}}
        if not hasattr(kernel, "binder"):
            kernel.binder = create_function_from_signature(
                kernel.signature, kernel.params, self.backend
            )
            kernel.shape = shape_of(kernel.src)
        bound, specialization, _ = kernel.binder(*args, **kwargs)
        options, signature, constexprs, attrs = kernel._pack_args(
            self.backend, kwargs, bound, specialization, None
        )
        launch = SimpleNamespace(
            kernel=kernel, options=options, signature=signature, constexprs=constexprs, attrs=attrs
        )
        self.found.setdefault(self.key_of(launch), launch)

    def key_of(self, launch):
        """Label, variant and shape; a renamed argument or an edited comment leaves them the same."""

        def token(kind, path):
            if isinstance(kind, tuple):
                return f"({' '.join(token(k, (*path, i)) for i, k in enumerate(kind))})"
            if kind == "constexpr":
                return f"={constant(launch.constexprs.get(path))}"
            return kind + "".join(f":{value}" for _, value in launch.attrs.get(path, ()))

        words = [token(kind, (i,)) for i, kind in enumerate(launch.signature.values())]
        given = vars(launch.options).items()
        words += [f"{name}:{value}" for name, value in given if value != self.defaults[name]]
        return label_of(launch.kernel), " ".join(words), launch.kernel.shape

    def on_gpu(self, operator, function):
        """Call a custom operator as if on a GPU; where that fails, as on a CPU."""

        @functools.wraps(function)
        def called(*args, **kwargs):
            if self.as_if_on_gpu:
                return function(*args, **kwargs)
            self.as_if_on_gpu = True
            try:
                with as_if_on_gpu():
                    return function(*args, **kwargs)
            except Exception as error:  # noqa: BLE001
                self.trouble[operator] = repr(error)[:300]
            finally:
                self.as_if_on_gpu = False
            return function(*args, **kwargs)

        return called


@contextlib.contextmanager
def as_if_on_gpu():
    """Let tensors on the CPU say that they are on a GPU; new ones are zeros."""
    import torch
    from torch.overrides import TorchFunctionMode

    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    getters = {"device": gpu, "is_cuda": True, "is_cpu": False}
    answers = {getattr(torch.Tensor, name): value for name, value in getters.items()}

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            name = getattr(function, "__name__", "")
            if name == "__get__" and function.__self__ in answers:
                return answers[function.__self__]
            args = [cpu if isinstance(arg, torch.device) else arg for arg in args]
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None:
                kwargs["device"] = cpu
            result = function(*args, **kwargs)
            return result.zero_() if "empty" in name else result

    h200 = SimpleNamespace(
        name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
        regs_per_multiprocessor=65536, L2_cache_size=60 * 2**20, total_memory=141 * 2**30,
    )  # fmt: skip
    answered = {
        "get_device_properties": lambda *_: h200,
        "get_device_capability": lambda *_: (9, 0),
        "current_device": lambda: 0,
        "is_current_stream_capturing": lambda: False,
    }
    before = {name: getattr(torch.cuda, name) for name in answered}
    vars(torch.cuda).update(answered)
    try:
        with Mode():
            yield
    finally:
        vars(torch.cuda).update(before)


def label_of(function):
    """Operator and name: ``layer_norm.forward_kernel``; families above the operator may change."""
    return f"{function.__module__.split('.')[-2]}.{function.__name__}"


def constant(value):
    if isinstance(value, tuple | list):
        return f"({' '.join(map(constant, value))})"
    return value.__name__ if hasattr(value, "binder") or callable(value) else str(value)


def shape_of(source):
    """Hash a function's structure without names, comments and docstrings."""
    tree = ast.parse(source)
    names = {}
    for node in ast.walk(tree):
        for field in ("id", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                setattr(node, field, names.setdefault(name, f"n{len(names)}"))
        body = getattr(node, "body", None)
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del body[0]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


# ---------------------------------------------------------------- compiles


def compile_launch(launches, launch):
    """Compile one launch to PTX, or say why not; runs in a process of its own."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource
    from triton.compiler.code_generator import CodeGenerator
    from triton.experimental.gluon._runtime import GluonASTSource

    reached, call = {function_of(launch.kernel)}, CodeGenerator.call_JitFunction

    def noted_call(generator, function, *args, **kwargs):
        reached.add(function_of(function))
        return call(generator, function, *args, **kwargs)

    CodeGenerator.call_JitFunction = noted_call
    backend, kernel, options = launches.backend, launch.kernel, launch.options
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, launch.signature, launch.constexprs, launch.attrs)
    context, stages, metadata = ir.context(), {}, {}
    try:
        ir.load_dialects(context)
        backend.load_dialects(context)
        module = source.make_ir(
            launches.target, options, backend.get_codegen_implementation(options),
            backend.get_module_map(), context,
        )  # fmt: skip
        backend.add_stages(stages, options, source.language)
        names = list(stages)
        for name in names[names.index(source.ext) : names.index("cubin")]:
            module = stages[name](module, metadata)
    except Exception as error:  # noqa: BLE001
        last = str(error).strip().splitlines() or [""]
        return {"error": f"{type(error).__name__}: {last[-1]}", "reached": reached}
    sizes = ("num_warps", "shared", "global_scratch_size", "tmem_size")
    head = "".join(f"{name} {metadata.get(name)}\n" for name in sizes)
    return {"ptx": head + normalised(module), "reached": reached}


def function_of(function):
    return f"{function.__module__}:{function.__name__}"


def normalised(ptx):
    """PTX without what a rename or a moved line changes: symbols, debug sections, comments."""
    ptx = re.sub(r"//[^\n]*", "", ptx.split(".section\t.debug")[0])
    ptx = re.sub(r"^\s*\.(file|loc|section)\b[^\n]*$", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(r"^\s*\$L__(tmp|func_\w+?)\d+:\s*$", "", ptx, flags=re.MULTILINE)
    symbols = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)
    for number, symbol in enumerate(dict.fromkeys(symbols)):
        ptx = re.sub(rf"(?<![\w$]){re.escape(symbol)}(?=_param_\d|\b)", f"function{number}", ptx)
    return "".join(f"{line.rstrip()}\n" for line in ptx.splitlines() if line.strip())


def in_bfloat16(launch):
    """Return the launch with pointers to 16-bit (or else to 32-bit) numbers in bfloat16, or None."""
    kinds = str(tuple(launch.signature.values()))
    half = next((kind for kind in ("*fp16", "*fp32") if kind in kinds), None)
    if half is None or "*fp64" in kinds or "*bf16" in kinds:
        return None

    def replaced(kind):
        return (
            tuple(map(replaced, kind)) if isinstance(kind, tuple) else kind.replace(half, "*bf16")
        )

    signature = {name: replaced(kind) for name, kind in launch.signature.items()}
    return SimpleNamespace(**{**vars(launch), "signature": signature})


# ---------------------------------------------------------------- a process that runs and compiles


class Plugin:
    """Runs those tests that no other process took, after importing all kernels as a GPU would."""

    def __init__(self, taken):
        self.taken, self.outcomes, self.failed = taken, Counter(), []

    def pytest_sessionstart(self, session):
        os.environ.pop("TRITON_INTERPRET", None)
        kernels = import_module("bevatron.kernels")
        for found in pkgutil.walk_packages(kernels.__path__, "bevatron.kernels."):
            import_module(found.name)
        os.environ["TRITON_INTERPRET"] = "1"  # The registry wants it of tensors on the CPU.
        with contextlib.suppress(ModuleNotFoundError):
            testing = import_module("bevatron.testing")
            testing.assert_close = lambda *_, **__: None

    def pytest_runtestloop(self, session):
        groups = defaultdict(list)
        for item in session.items:
            groups[item.nodeid.split("[")[0]].append(item)
        groups = list(groups.values())
        while True:
            with self.taken.get_lock():
                number = self.taken.value
                self.taken.value += 1
            if number >= len(groups):
                return True
            for item, after in zip(groups[number], [*groups[number][1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] += 1
            if report.outcome == "failed":
                self.failed.append(report.nodeid)


def work(pipe, taken, root, tests):
    """Run tests and send what they launched; then compile what is asked for."""
    import pytest

    sys.path.insert(0, f"{root}/src")
    launches = Launches()
    launches.patch()
    plugin = Plugin(taken)
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("ptx", deadline=None, database=None)
        settings.load_profile("ptx")
    options = ["-q", "--no-header", "--tb=line", "--hypothesis-seed=0", f"--rootdir={root}"]
    options += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*options, *tests], plugins=[plugin])
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        sys.exit(f"{root}: the tests were not run")
    pipe.send((list(launches.found), launches.trouble, plugin.outcomes, plugin.failed))
    for key, bfloat16 in iter(pipe.recv, None):
        launch = launches.found[key]
        if bfloat16:
            launch = in_bfloat16(launch)
        if launch is None:
            pipe.send((None, {}))
        else:
            pipe.send((launches.key_of(launch), forked(launches, launch)))


def forked(launches, launch):
    """Compile in a process of its own, which may crash or take too long."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    process = fork.Process(target=lambda: theirs.send(compile_launch(launches, launch)))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(SECONDS) else {"error": f"not within {SECONDS} seconds"}
    except EOFError:
        return {"error": "the compiler died"}
    finally:
        process.kill()
        process.join()


# ---------------------------------------------------------------- record


def record(out, root, tests, like, processes, most):
    start = time.monotonic()
    os.environ |= {
        "PYTHONPATH": str(root / "src"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
        "MPLBACKEND": "Agg",
    }  # fmt: skip
    os.environ.pop("TRITON_INTERPRET", None)
    os.chdir(root)
    context = multiprocessing.get_context("spawn")
    taken, pipes = context.Value("i", 0), []
    for _ in range(processes):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs, taken, str(root), tests)).start()
        theirs.close()
        pipes.append(ours)
    knows, trouble, outcomes, failed = {}, {}, Counter(), []
    for pipe in pipes:
        found, troubles, counts, failures = pipe.recv()
        knows[pipe] = set(found)
        trouble |= troubles
        outcomes += counts
        failed += failures
    tested = time.monotonic()
    print(f"tests: {dict(outcomes)} in {tested - start:.0f} s", flush=True)
    chosen, kernels = choose(set().union(*knows.values()), like, most)
    sources, reached = compile_all(pipes, knows, chosen, kernels)
    for pipe in pipes:
        pipe.send(None)
    never = sorted(written_kernels(root) - reached)
    result = {"kernels": kernels, "sources": sources, "never": never, "trouble": trouble}
    result |= {"failed_tests": failed, "seconds": [tested - start, time.monotonic() - tested]}
    with opened(out, "wt") as file:
        json.dump(result, file, indent=0, sort_keys=True)
    summarise(result)


def choose(keys, like, most):
    """Take the most different launches of each kernel, and of those two or four in bfloat16."""
    by_label = defaultdict(list)
    for key in sorted(keys):
        by_label[key[0]].append(key)
    chosen, kernels = [], {}
    for label, found in by_label.items():
        wanted = {variant["key"] for variant in like.get(label, {"variants": []})["variants"]}
        seen, taken = Counter(), []
        rest = dict.fromkeys(found)
        while rest and len(taken) < most:
            best = max(rest, key=lambda key: news(key, seen, wanted))
            del rest[best]
            seen.update(features(best))
            taken.append(best)
        kernels[label] = {"noted": len(found), "left_out": len(rest), "variants": []}
        chosen += [(key, False) for key in taken] + [(key, True) for key in taken]
    return chosen, kernels


def features(key):
    _, variant, shape = key
    words = variant.split()
    types = [word.split(":")[0] for word in words if not word.startswith("=")]
    return [*enumerate(words), " ".join(types), shape]


def news(key, seen, wanted):
    """Rank a launch: whether another recording has it, then how much of it no other launch has."""
    unseen = [feature for feature in features(key) if not seen[feature]]
    return key[1] in wanted, sum(1 if isinstance(f, tuple) else 8 for f in unseen)


def compile_all(pipes, knows, chosen, kernels):
    """Let each process compile launches that it noted, until all are done."""
    sources, reached, done = {}, set(), 0
    waiting, busy, idle = list(chosen), set(), list(pipes)
    while waiting or busy:
        for pipe in idle:
            task = next((task for task in waiting if task[0] in knows[pipe]), None)
            if task is not None:
                waiting.remove(task)
                busy.add(pipe)
                pipe.send(task)
        idle = wait(list(busy))
        for pipe in idle:
            key, outcome = pipe.recv()
            busy.discard(pipe)
            if key is None:
                continue
            done += 1
            if done % 100 == 0:
                print(f"compiled {done}, {len(waiting)} to go", flush=True)
            reached |= outcome.get("reached", set())
            variant = {"key": key[1], "shape": key[2]}
            if "ptx" in outcome:
                text = outcome["ptx"].encode()
                digest = hashlib.sha256(text).hexdigest()[:16]
                sources[digest] = base64.b64encode(zlib.compress(text, 9)).decode()
                variant |= {"ptx": digest, "bytes": len(text)}
            else:
                variant["error"] = outcome["error"]
            kernels[key[0]]["variants"].append(variant)
    return sources, reached


def written_kernels(root):
    """Return module and name of all functions under src that ``triton.jit`` decorates."""
    found = set()
    for path in (root / "src").rglob("*.py"):
        text = path.read_text()
        if "triton.jit" not in text:
            continue
        module = ".".join(path.relative_to(root / "src").with_suffix("").parts)
        for node in ast.walk(ast.parse(text)):
            decorators = getattr(node, "decorator_list", ())
            if any(ast.unparse(each).startswith("triton.jit") for each in decorators):
                found.add(f"{module}:{node.name}")
    return found


def summarise(result):
    kernels = result["kernels"]
    variants = [v | {"label": k} for k, entry in kernels.items() for v in entry["variants"]]
    errors = [v for v in variants if "error" in v]
    left_out = sum(entry["left_out"] for entry in kernels.values())
    print(f"{len(kernels)} kernels, {len(variants)} variants, {left_out} left out")
    print("tests took {:.0f} s, compilation {:.0f} s".format(*result["seconds"]))
    for name, lines in {
        "variants that do not compile": [f"{v['label']} {v['key']}: {v['error']}" for v in errors],
        "operators that did not run as if on a GPU": [
            f"{name}: {error}" for name, error in result["trouble"].items()
        ],
        "tests that failed": result["failed_tests"],
        "kernels never compiled": result["never"],
    }.items():
        print(f"{name}: {len(lines)}", *lines, sep="\n  ")


# ---------------------------------------------------------------- compare


def compare(before, after, renamed, show):
    """Print which kernels differ; return how many."""
    a, b = read(before), read(after)
    old, new = a["kernels"], b["kernels"]
    old = {renamed.get(k, renamed.get(k.split(".")[1], k)): v for k, v in old.items()}
    counts = Counter()
    for label, other in sorted(pairs(old, new)):
        if label is None or other is None:
            state, left, right = ("new" if label is None else "missing"), {}, {}
        else:
            left, right = outcomes_of(old[label]), outcomes_of(new[other])
            common = left.keys() & right.keys()
            changed = [key for key in common if left[key] != right[key]]
            gone, come = left.keys() - right.keys(), right.keys() - left.keys()
            state = "changed" if changed else "other variants" if gone or come else "equal"
        counts[state] += 1
        if state == "equal":
            continue
        name = label or other if label in {other, None} or other is None else f"{label} -> {other}"
        print(f"{state}: {name}")
        if not (left and right):
            continue
        print(f"  {len(common) - len(changed)} equal, {len(changed)} changed")
        print(*(f"  only before: {key}" for key in sorted(gone)), sep="\n", end="\n" * bool(gone))
        print(*(f"  only after: {key}" for key in sorted(come)), sep="\n", end="\n" * bool(come))
        for key in changed if show in {label, other, other.split(".")[1]} else []:
            show_difference(key, left[key] - right[key], right[key] - left[key], a, b)
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    return counts.total() - counts["equal"]


def pairs(old, new):
    """Match kernels by label, then (an operator was renamed) by name and most equal variants."""
    for label in old.keys() & new.keys():
        yield label, label
    rest = new.keys() - old.keys()
    for label in sorted(old.keys() - new.keys()):
        same_name = [other for other in sorted(rest) if other.split(".")[1] == label.split(".")[1]]
        keys = outcomes_of(old[label]).items()
        other = max(same_name, key=lambda k: len(keys & outcomes_of(new[k]).items()), default=None)
        rest.discard(other)
        yield label, other
    yield from ((None, other) for other in rest)


def outcomes_of(entry):
    """Return the PTX of each variant; generated kernels have several of one signature."""
    found = defaultdict(set)
    for variant in entry["variants"]:
        found[variant["key"]].add(variant.get("ptx", "does not compile"))
    return {key: frozenset(digests) for key, digests in found.items()}


def show_difference(key, gone, come, a, b):
    def lines(digests, recording):
        texts = (recording["sources"].get(digest, "") for digest in sorted(digests))
        texts = (zlib.decompress(base64.b64decode(text)) if text else b"" for text in texts)
        return [line for text in texts for line in text.decode().splitlines()]

    print(f"  {key}")
    both = difflib.unified_diff(lines(gone, a), lines(come, b), "before", "after", "", "", 2, "")
    print(*both, sep="\n")


def opened(path, mode):
    return (gzip.open if str(path).endswith(".gz") else open)(path, mode)


def read(path):
    with opened(path, "rt") as file:
        return json.load(file)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="compile what the tests launch")
    recording.add_argument("out", type=Path)
    recording.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    recording.add_argument("--tests", nargs="+", default=["tests/kernels"], metavar="PATH")
    recording.add_argument("--like", type=Path, help="first the variants of this recording")
    recording.add_argument("--processes", type=int, default=2)
    recording.add_argument("--most", type=int, default=12, help="variants of a kernel")
    comparing = commands.add_parser("compare", help="exit with 1 on any difference")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--renamed", action="append", default=[], metavar="OLD=NEW")
    comparing.add_argument("--show", metavar="KERNEL", help="print how its PTX differs")
    args = parser.parse_args()
    if args.command == "record":
        like = read(args.like)["kernels"] if args.like else {}
        out, root = args.out.resolve(), args.root.resolve()
        record(out, root, args.tests, like, args.processes, args.most)
        return 0
    renamed = dict(each.split("=") for each in args.renamed)
    return bool(compare(args.before, args.after, renamed, args.show))


if __name__ == "__main__":
    sys.exit(main())
