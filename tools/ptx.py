"""Compile every Triton kernel to PTX as the kernel tests launch it, and compare two checkouts.

    python tools/ptx.py record before.json.gz --root OTHER_CHECKOUT
    python tools/ptx.py record after.json.gz --like before.json.gz
    python tools/ptx.py compare before.json.gz after.json.gz --show layer_norm.forward_kernel

Needs no GPU: it stops at PTX for sm_90. Launches are found by a hook, not by a list of files. The
kernel tests run with tensors on the CPU, but custom operators are told that they are on an H200,
so that they choose what a GPU would run. No kernel runs: a launch is noted, results are zeros, and
comparisons of tensors hold, so that a test goes on to its next launch (some tests fail; that does
not matter). Then distinct launches are compiled, also with bfloat16 for float16 or float32.

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
import subprocess
import sys
import time
import zlib
from collections import Counter, defaultdict
from importlib import import_module
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

SECONDS = 300
"""Time a kernel may take to compile."""


class Launches:
    """What JIT functions were launched with; launches are not run."""

    def __init__(self):
        self.found, self.trouble, self.as_if_on_gpu = {}, {}, False

    def patch(self):
        """Note launches; run custom operators as if on a GPU; let comparisons of tensors hold."""
        import torch
        import triton
        from torch._library.custom_ops import CustomOpDef
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import JITFunction

        triton.knobs.runtime.interpret = False
        triton.knobs.compilation.disable_line_info = True
        self.target = GPUTarget("cuda", 90, 32)
        self.backend = make_backend(self.target)
        self.defaults = vars(self.backend.parse_options({}))
        register = CustomOpDef.register_kernel

        def register_kernel(operator, device_types, function=None, /):
            def inner(function):
                register(operator, device_types)(self.on_gpu(str(operator), function))
                return function

            return inner if function is None else inner(function)

        JITFunction.run = lambda kernel, *args, **kwargs: self.note(kernel, args, kwargs)
        CustomOpDef.register_kernel = register_kernel
        # Operators may skip the dispatcher, and with it the hook above; older checkouts never do.
        with contextlib.suppress(ModuleNotFoundError):
            import_module("bevatron.kernels.shared.custom_op").is_watched = lambda *_: True
        torch.cuda.device.__enter__ = torch.cuda.device.__exit__ = lambda *_: None
        torch.equal = torch.allclose = torch.testing.assert_close = lambda *_, **__: True
        torch.autograd.gradcheck = torch.autograd.gradgradcheck = torch.equal

    def note(self, kernel, args, kwargs):
        """Keep what Triton would compile for this launch."""
        from triton.runtime.jit import create_function_from_signature

        kwargs = {k: v for k, v in kwargs.items() if k not in {"grid", "warmup"}}
        if not hasattr(kernel, "binder"):
            given = kernel.signature, kernel.params, self.backend
            kernel.binder, kernel.shape = create_function_from_signature(*given), shape_of(kernel)
        bound, specialization, _ = kernel.binder(*args, **kwargs)
        given = self.backend, kwargs, bound, specialization, None
        options, signature, constexprs, attrs = kernel._pack_args(*given)  # noqa: SLF001
        launch = SimpleNamespace(
            kernel=kernel, options=options, signature=signature, constexprs=constexprs, attrs=attrs
        )
        self.found.setdefault(self.key_of(launch), launch)

    def key_of(self, launch):
        """Label, variant, structure and text, which alone shows comments and names."""

        def token(kind, path):
            if isinstance(kind, tuple):
                return f"({' '.join(token(k, (*path, i)) for i, k in enumerate(kind))})"
            if kind == "constexpr":
                return f"={constant(launch.constexprs.get(path))}"
            return kind + "".join(f":{value}" for _, value in launch.attrs.get(path, ()))

        words = [token(kind, (i,)) for i, kind in enumerate(launch.signature.values())]
        given = vars(launch.options).items()
        words += [f"{name}:{value}" for name, value in given if value != self.defaults[name]]
        kernel = launch.kernel
        label = f"{kernel.__module__.split('.')[-2]}.{kernel.__name__}"
        return label, " ".join(words), kernel.shape, kernel.src

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

    getters = {"device": torch.device("cuda", 0), "is_cuda": True, "is_cpu": False}
    answers = {getattr(torch.Tensor, name): value for name, value in getters.items()}
    cpu = torch.device("cpu")

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


def constant(value):
    if isinstance(value, tuple | list):
        return f"({' '.join(map(constant, value))})"
    return value.__name__ if callable(value) and hasattr(value, "__name__") else str(value)


def shape_of(kernel):
    """Hash a function's structure without names, comments and docstrings."""
    tree, names = kernel.parse(), {}
    for node in ast.walk(tree):
        for field in ("id", "arg", "name"):
            if isinstance(name := getattr(node, field, None), str):
                setattr(node, field, names.setdefault(name, f"n{len(names)}"))
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return digest_of(ast.dump(tree))


def digest_of(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_bfloat16(launch):
    """Return the launch with pointers to 16-bit (or else 32-bit) numbers in bfloat16, or None."""
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


def compile_launch(pipe, launches, launch):
    """Send which functions a launch compiles, and its PTX or why there is none."""
    from triton._C.libtriton import ir
    from triton.compiler import ASTSource
    from triton.compiler.code_generator import CodeGenerator
    from triton.experimental.gluon._runtime import GluonASTSource

    backend, kernel, options = launches.backend, launch.kernel, launch.options
    reached, call = {f"{kernel.__module__}:{kernel.__name__}"}, CodeGenerator.call_JitFunction

    def noted_call(generator, function, *args, **kwargs):
        reached.add(f"{function.__module__}:{function.__name__}")
        return call(generator, function, *args, **kwargs)

    CodeGenerator.call_JitFunction = noted_call
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, launch.signature, launch.constexprs, launch.attrs)
    context, stages, metadata = ir.context(), {}, {}
    try:
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions = backend.get_codegen_implementation(options), backend.get_module_map()
        module = source.make_ir(launches.target, options, *functions, context)
        backend.add_stages(stages, options, source.language)
        names = list(stages)
        for name in names[names.index(source.ext) : names.index("cubin")]:
            module = stages[name](module, metadata)
    except Exception as error:  # noqa: BLE001
        last = str(error).strip().splitlines() or [""]
        pipe.send((reached, {"error": f"{type(error).__name__}: {last[-1]}"}))
        return
    sizes = ("num_warps", "shared", "global_scratch_size", "tmem_size")  # not in the PTX
    head = "".join(f"{name} {metadata.get(name)}\n" for name in sizes)
    pipe.send((reached, {"text": head + normalised(module)}))


def normalised(ptx):
    """PTX without what a rename or a moved line changes: symbols, debug sections, comments."""
    ptx = re.sub(r"//[^\n]*", "", ptx.split(".section\t.debug")[0])
    ptx = re.sub(r"^\s*\.(file|loc|section)\b[^\n]*$", "", ptx, flags=re.MULTILINE)
    ptx = re.sub(r"^\s*\$L__(tmp|func_\w+?)\d+:\s*$", "", ptx, flags=re.MULTILINE)
    symbols = re.findall(r"\.(?:entry|func)\s+(?:\([^)]*\)\s*)?([\w$]+)", ptx)
    for number, symbol in enumerate(dict.fromkeys(symbols)):
        ptx = re.sub(rf"(?<![\w$]){re.escape(symbol)}(?=_param_\d|\b)", f"function{number}", ptx)
    return "".join(f"{line.rstrip()}\n" for line in ptx.splitlines() if line.strip())


class Plugin:
    """Imports all kernels as a GPU would, before the tests."""

    def pytest_sessionstart(self):
        """Import kernels without TRITON_INTERPRET, which the registry wants of CPU tensors."""
        os.environ.pop("TRITON_INTERPRET", None)
        kernels = import_module("bevatron.kernels")
        for found in pkgutil.walk_packages(kernels.__path__, "bevatron.kernels."):
            import_module(found.name)
        os.environ["TRITON_INTERPRET"] = "1"
        with contextlib.suppress(ModuleNotFoundError):
            import_module("bevatron.testing").assert_close = lambda *_, **__: None


def record(out, root, tests, like, processes, most):
    import pytest

    start = time.monotonic()
    launches = Launches()
    launches.patch()
    options = ["-q", "--no-header", "--tb=no", "-W", "ignore", f"--rootdir={root}", "-r", "N"]
    for plugin in ("cacheprovider", "xdist", "benchmark"):
        options += ["-p", f"no:{plugin}"]
    # What is drawn depends on the sources: hypothesis tries the constants that it finds in them.
    options += ["-m", "not hypothesis"]
    done = subprocess.CompletedProcess((), 0, "", "")
    with mock.patch("subprocess.run", return_value=done):  # Their launches would not be seen.
        status = pytest.main([*options, *tests], plugins=[Plugin()])
    if status not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        return f"{root}: the tests did not run"
    tested = time.monotonic()
    result = choose(launches, like, most)
    reached = compile_all(launches, result, processes)
    result |= {"never": sorted(written_kernels(root) - reached), "trouble": launches.trouble}
    result |= {"seconds": [tested - start, time.monotonic() - tested]}
    with opened(out, "wt") as file:
        json.dump(result, file, indent=0, sort_keys=True)
    summarise(result)
    return 0


def choose(launches, like, most):
    """Take the most different launches of each kernel, and the same in bfloat16."""
    by_label, kernels = defaultdict(list), {}
    for key in sorted(launches.found):
        by_label[key[0]].append(key)
    for label, found in by_label.items():
        wanted = {variant["key"] for variant in like.get(label, {"variants": []})["variants"]}
        seen, taken, rest = set(), {}, dict.fromkeys(found)
        while rest and len(taken) < most:
            # Types and structure that no other has count for more than a size or an alignment.
            news = {key: (key[1] in wanted, rank(features(key) - seen)) for key in rest}
            best = max(rest, key=news.get)
            seen |= features(best)
            taken[best] = rest.pop(best)
        for key in list(taken):
            launch = in_bfloat16(launches.found[key])
            if launch is not None:
                taken[launches.key_of(launch)] = None
                launches.found.setdefault(launches.key_of(launch), launch)
        kernels[label] = {"noted": len(found), "left_out": len(rest), "variants": list(taken)}
    return {"kernels": kernels, "sources": {}}


def rank(features):
    return sum(1 if isinstance(feature, tuple) else 8 for feature in features)


def features(key):
    words = key[1].split()
    types = [word.split(":")[0] for word in words if not word.startswith("=")]
    return {*enumerate(words), " ".join(types), key[2]}


def compile_all(launches, result, processes):
    """Compile each variant in a process of its own, which may crash or take too long."""
    fork, running, reached = multiprocessing.get_context("fork"), {}, set()
    waiting = [key for entry in result["kernels"].values() for key in entry["variants"]]
    for entry in result["kernels"].values():
        entry["variants"] = []
    done = 0
    while waiting or running:
        while waiting and len(running) < processes:
            key = waiting.pop()
            ours, theirs = fork.Pipe()
            given = theirs, launches, launches.found[key]
            process = fork.Process(target=compile_launch, args=given)
            process.start()
            theirs.close()
            running[ours] = key, process
        # Another starts when one is done: if none is, all took too long.
        for pipe in wait(list(running), SECONDS) or list(running):
            (label, variant, *_), process = running.pop(pipe)
            try:
                functions, outcome = pipe.recv() if pipe.poll() else ((), {"error": "too slow"})
            except EOFError:
                functions, outcome = (), {"error": "the compiler died"}
            process.kill()
            process.join()
            pipe.close()
            reached.update(functions)
            done += 1
            if done % 100 == 0:
                print(f"compiled {done}, {len(waiting)} to go", flush=True)
            if (text := outcome.pop("text", None)) is not None:
                outcome["ptx"] = digest_of(text)
                source = base64.b64encode(zlib.compress(text.encode(), 9)).decode()
                result["sources"][outcome["ptx"]] = source
            result["kernels"][label]["variants"].append({"key": variant, **outcome})
    return reached


def written_kernels(root):
    """Return module and name of all functions under src that ``triton.jit`` decorates."""
    found = set()
    for path in (root / "src").rglob("triton*.py"):
        module = ".".join(path.relative_to(root / "src").with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            decorators = getattr(node, "decorator_list", ())
            if any("triton.jit" in ast.unparse(each) for each in decorators):
                found.add(f"{module}:{node.name}")
    return found


def summarise(result):
    kernels = result["kernels"]
    variants = [(k, v) for k, entry in kernels.items() for v in entry["variants"]]
    left_out = sum(entry["left_out"] for entry in kernels.values())
    print(f"{len(kernels)} kernels, {len(variants)} variants, {left_out} left out")
    print("tests took {:.0f} s, compilation {:.0f} s".format(*result["seconds"]))
    errors = [f"{k} {v['key']}: {v['error']}" for k, v in variants if "error" in v]
    for name, lines in {
        "variants that do not compile": errors,
        "operators that did not run as if on a GPU": [*map(": ".join, result["trouble"].items())],
        "kernels never compiled": result["never"],
    }.items():
        print(f"{name}: {len(lines)}", *lines, sep="\n  ")


def compare(before, after, renamed, show):
    """Print which kernels differ; return how many."""
    a, b = read(before), read(after)
    old = {renamed.get(k, k): outcomes_of(v) for k, v in a["kernels"].items()}
    new = {k: outcomes_of(v) for k, v in b["kernels"].items()}
    counts = Counter()
    for label, other in sorted(pairs(old, new), key=str):
        left, right = old.get(label, {}), new.get(other, {})
        changed = [key for key in left.keys() & right.keys() if left[key] != right[key]]
        gone, come = left.keys() - right.keys(), right.keys() - left.keys()
        state = "missing" if not right else "new" if not left else "equal"
        if left and right and (changed or gone or come):
            state = "changed" if changed else "other variants"
        counts[state] += 1
        if state == "equal":
            continue
        print(f"{state}: {label or other}")
        if not (left and right):
            continue
        print(f"  {len(left) - len(gone) - len(changed)} equal, {len(changed)} changed")
        for key in sorted(gone | come):
            print(f"  only {'before' if key in gone else 'after'}: {key}")
        for key in sorted(changed) if show in {label, other} else ():
            show_difference(key, left[key] - right[key], right[key] - left[key], a, b)
    print(", ".join(f"{count} {state}" for state, count in sorted(counts.items())))
    return counts.total() - counts["equal"]


def pairs(old, new):
    """Match kernels by label, then (an operator was renamed) by name and most equal variants."""
    yield from ((label, label) for label in old.keys() & new.keys())
    rest = new.keys() - old.keys()
    for label in sorted(old.keys() - new.keys()):
        same = [other for other in sorted(rest) if other.split(".")[1] == label.split(".")[1]]
        other = max(same, key=lambda k: len(old[label].items() & new[k].items()), default=None)
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
        for digest in sorted(digests & recording["sources"].keys()):
            source = base64.b64decode(recording["sources"][digest])
            yield from zlib.decompress(source).decode().splitlines()

    texts = list(lines(gone, a)), list(lines(come, b))
    print(f"  {key}", *difflib.unified_diff(*texts, "before", "after", n=2, lineterm=""), sep="\n")


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
    comparing.add_argument("--show", metavar="OPERATOR.KERNEL", help="print how its PTX differs")
    args = parser.parse_args()
    if args.command == "compare":
        renamed = dict(each.split("=") for each in args.renamed)
        return int(compare(args.before, args.after, renamed, args.show) > 0)
    like = read(args.like)["kernels"] if args.like else {}
    out, root = args.out.resolve(), args.root.resolve()
    os.environ |= {"PYTHONPATH": f"{root}/src", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    os.environ |= {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    sys.path.insert(0, f"{root}/src")
    os.chdir(root)
    return record(out, root, args.tests, like, args.processes, args.most)


if __name__ == "__main__":
    sys.exit(main())
