"""What the command line says of itself, how soon, and of arguments that make no sense."""

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise

import pytest

from bevatron.cli import main, one_sentence

COMMANDS = (
    *("prepare", "evaluate", "predict", "relax", "embed", "inspect", "env", "demo"),
    *("init", "compare", "completion", "evaluate gpspp", "evaluate graph", "predict gpspp"),
    *("predict graph", "prepare gpspp"),
    *("train mace", "train gpspp", "train graph", "convert mace-torch", "convert to-mace-torch"),
    *("bench store", "bench loader", "bench packing", "bench cost", "bench capacity"),
    *("train alphafold2", "train alphafold3", "prepare alphafold2", "prepare alphafold3"),
    *("predict alphafold2", "predict alphafold3", "evaluate alphafold2", "evaluate alphafold3"),
    *("convert alphafold2", "convert to-openfold", "convert to-deepmind"),
    "convert to-mlperf",
    *("convert alphafold3", "convert to-protenix", "bench profile"),
)


def test_the_help_of_train_leaves_out_what_the_data_decide(capsys):
    assert main(["train", "mace", "--help-all"]) == 0
    said = capsys.readouterr().out
    assert "--model.num-channels" in said
    assert "--data" in said
    assert "--loader.prefetch" in said
    for name in ("atomic-numbers", "atomic-energies", "avg-num", "coefficients", "model.heads"):
        assert name not in said


def test_env_says_what_runs_and_why_not(capsys):
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    for word in ("torch ", "devices", "channelwise_tensor_product", "gloo"):
        assert word in said


def test_env_tells_a_reason_once(capsys):
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    reasons = re.findall(r"\(auto.*\)", said)
    assert len(reasons) > 1
    assert len(reasons) == len(set(reasons))
    assert "rdkit" in said


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["predict", "--help"]])
def test_help_and_version_are_printed(arguments, capsys):
    assert main(arguments) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("system", "option", "value", "said"),
    [
        ("alphafold3", "stages.initial.steps", "0", "expected 1 or more, got 0"),
        ("alphafold3", "stages.initial.crop", "-3", "expected 1 or more, got -3"),
        ("alphafold3", "stages.initial.atoms", "0", "expected 24 or more, got 0"),
        ("alphafold3", "stages.initial.step.copies", "0", "expected 1 or more, got 0"),
        ("alphafold3", "validation_steps", "0", "expected 1 or more, got 0"),
        ("alphafold2", "stages.initial.crop", "0", "expected 1 or more, got 0"),
        ("alphafold2", "stages.initial.extra_rows", "0", "expected 1 or more, got 0"),
        ("alphafold2", "model.evoformer.num_blocks", "-1", "expected 1 or more, got -1"),
        ("alphafold2", "model.structure.position_scale", "0", "expected a number above 0, got 0.0"),
        ("alphafold2", "stages.initial.loss.fape", "-1", "expected 0 or more, got -1.0"),
        ("alphafold3", "stages.initial.step.loss.bond", "-1", "expected 0 or more, got -1.0"),
        ("alphafold3", "optim.eps", "0", "expected a number above 0, got 0.0"),
        ("mace", "loss.energy_weight", "nan", "expected a finite number, got nan"),
    ],
)
def test_a_value_out_of_range_is_named_with_its_whole_path(capsys, system, option, value, said):
    typed = f"--{option.replace('_', '-')}"
    assert main(["train", system, "--preset", "small", typed, value]) == 2
    assert capsys.readouterr().err == f"error: {option}: {said}\n"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["train", "mace", "--data", "a.xyz", "--output", ""], "--output"),
        (["train", "mace", "--output=", "--data", "a.xyz"], "--output"),
        (["prepare", "a.xyz", "--out", ""], "--out"),
    ],
)
def test_an_empty_output_is_not_the_current_folder(
    arguments, option, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert f"error: {option}: is empty" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_lists_of_numbers_are_asked_for_in_plain_words(capsys):
    assert main(["train", "mace", "--optim.ema", "much"]) == 2
    assert main(["predict", "alphafold3", "run", "in", "out", "--seeds", "one"]) == 2
    assert main(["train", "alphafold2", "--data.shares", "a", "b"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: --optim.ema: expected a number or several, got 'much'",
        "error: --seeds: expected whole numbers, got 'one'",
        "error: --data.shares: expected numbers, got 'a', 'b'",
    ]


@pytest.mark.parametrize("code", [errno.ENAMETOOLONG, errno.ESTALE, errno.EIO, errno.EMFILE])
def test_what_a_file_system_refuses_is_one_sentence(capsys, code):
    def fails():
        raise OSError(code, os.strerror(code), "far/away")

    assert one_sentence(fails) == 2
    assert capsys.readouterr().err == f"error: far/away: {os.strerror(code)}\n"


def test_wrong_ranks_are_one_sentence_of_the_whole_command():
    words = [sys.executable, "-m", "bevatron", "train", "alphafold3", "--data", "nothing"]
    ranks = {"RANK": "x", "WORLD_SIZE": "2"}
    env = {**os.environ, **ranks}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_a_key_of_a_file_is_spelt_as_in_the_file(capsys, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("recipe: alphafold3\ndata: {train: complexes}\n")
    assert main(["train", str(file)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: data.train: expected a list")


def test_debug_shows_the_traceback():
    with pytest.raises(Exception, match="there is no command"):
        main(["nothing", "--debug"])


def test_importing_the_package_is_light():
    code = "import sys, bevatron; print([m for m in ('torch', 'numpy', 'ase') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_and_version_do_not_wait_for_torch():
    code = "import sys; from bevatron.cli import main; main(['--help']); main(['--version']); "
    code += "print([m for m in ('torch', 'numpy', 'tyro') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


HEAVY = ("torch", "matplotlib", "rdkit", "ase", "pyarrow", "scipy", "rich.progress")


def test_help_imports_nothing_heavy():
    code = "import sys; from bevatron.cli import main\n"
    code += f"for command in {[c for c in COMMANDS if c != 'completion']}:\n"
    code += "    assert main([*command.split(), '--help']) == 0\n"
    code += f"    found = [m for m in {HEAVY} if m in sys.modules]\n"
    code += "    assert not found, (command, found)\n"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_old_name_of_an_option_is_taken_with_a_warning(tmp_path):
    words = ["train", "mace", "--data.valid-fraction", "0.3", "--data", "missing.xyz"]
    code = f"from bevatron.cli import main; main({[*words, '--output', str(tmp_path / 'run')]})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[0] == "data.valid_fraction is now data.valid_size: 0.3"
    assert "missing.xyz" in done.stderr.splitlines()[-1]


def test_what_is_wrong_with_a_file_is_said_without_torch(tmp_path):
    (tmp_path / "broken.yaml").write_text("data: {train: [a}\n")
    (tmp_path / "other.yaml").write_text("recipe: alphafold4\n")
    files = [str(tmp_path / f"{name}.yaml") for name in ("broken", "other", "missing")]
    code = "import sys; from bevatron.cli import main\n"
    code += f"print([main(['train', name]) for name in {[*files, 'nothing']}])\n"
    code += f"print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[2, 2, 2, 2]", "[]"]
    for said in (
        "line 1: not valid YAML",
        "there is no 'alphafold4'",
        "cannot be read",
        "'nothing'",
    ):
        assert said in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_short_help_has_examples_and_explains_every_option(command, capsys):
    assert main([*command.split(), "--help"]) == 0
    said = capsys.readouterr().out
    name = " ".join(command.split()[: 2 if command.startswith(("bench", "convert")) else 1])
    if command != "env":
        assert f"  bevatron {name} " in said or f"  source <(bevatron {name} " in said, said
    assert f"usage: bevatron {name}" in said
    assert "--help-all" in said
    lines = [line for line in said.splitlines() if re.match(r"  (--|[A-Z])", line)]
    for line, below in pairwise([*said.splitlines(), ""]):
        if line in lines:
            assert line[35:].strip() or below[35:].strip(), line
    assert max(map(len, said.splitlines())) <= 80


def test_the_short_help_of_train_has_the_keys_of_the_starter_configuration(capsys):
    for arguments in (["train", "gpspp", "--help"], ["train", "gpspp", "-h"]):
        assert main(arguments) == 0
        said = capsys.readouterr().out
        assert "--optim.lr 0.0004" in said
        assert "--resume never" in said
        assert "--data FILE" in said
        assert "--loader.prefetch" not in said


def test_the_short_help_of_a_yaml_file_is_that_of_its_system(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("recipe: graph\noutput: runs/a\n")
    assert main(["train", str(path), "--help"]) == 0
    assert "Train graph: " in capsys.readouterr().out


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """Asks bash what it would complete."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("there is no bash")
    place = tmp_path_factory.mktemp("completion")
    with (place / "script").open("w") as file:
        command = [sys.executable, "-m", "bevatron", "completion", "bash"]
        subprocess.run(command, stdout=file, check=True)
    (place / "water.extxyz").touch()

    def ask(*words):
        lines = [
            f"source ./script; COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}",
            "function=$(complete -p bevatron | sed 's/.*-F \\([^ ]*\\).*/\\1/'); $function",
            'printf "%s\\n" "${COMPREPLY[@]}"',
        ]
        done = subprocess.run(
            [bash, "-c", "\n".join(lines)], cwd=place, capture_output=True, text=True, check=True
        )
        return set(done.stdout.split())

    return ask


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["bevatron", "ev"], {"evaluate"}),
        (["bevatron", "bench", "pro"], {"profile"}),
        (["bevatron", "convert", "to-"],
         {"to-mace-torch", "to-openfold", "to-mlperf", "to-deepmind", "to-protenix"}),
        (["bevatron", "train", "g"], {"gpspp", "graph"}),
        (["bevatron", "train", "mace", "--model.num-ch"], {"--model.num-channels"}),
        (["bevatron", "train", "gpspp", "--optim.algorithm", "adamw"], {"adamw"}),
        (["bevatron", "evaluate", "runs/water", "--labels.ene"],
         {"--labels.energy-key", "--labels.energy-weight-key"}),
        (["bevatron", "predict", "runs/gap", "--mo"], {"--mode"}),
        (["bevatron", "evaluate", "wat"], set()),  # left to bash, which completes files
    ],
)  # fmt: skip
def test_bash_completes_commands_options_and_choices(completed, words, expected):
    assert completed(*words) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_explained(command, capsys):
    assert main([*command.split(), "--help-all"]) == 0
    said = capsys.readouterr().out
    assert "``" not in said
    lines = [line.strip("│ ") for line in said.splitlines()]
    for option, below in pairwise(lines):
        if option.startswith("--"):
            words = option.partition("  ")[2] or below
            assert not words.strip().startswith(("(default", "(required")), option


def test_every_command_of_the_usage_is_there(capsys):
    main([])
    said = capsys.readouterr().out
    for name in re.findall(r"^  bevatron (\w+)", said, flags=re.MULTILINE):
        if name not in {"train", "convert", "bench"}:
            assert main([name, "--help"]) == 0


MISTAKES = {
    "command": (["predct"], "did you mean 'predict'"),
    "group": (["bench"], "needs one of: store, loader"),
    "recipe": (["train", "macee"], r"there is no recipe 'macee' \(known: .*mace\)"),
    "preset": (["train", "mace", "--preset", "smaller"], "there is no 'smaller' .*small"),
    "no data": (["train", "mace"], r"expected a file of structures or a store \(`--data FILE`\)"),
    "data missing": (["train", "mace", "--data", "no.xyz"], "no.xyz: the file does not exist"),
    "option": (["train", "mace", "--optim.lrr", "1"], r"no option --optim.lrr .*--optim.lr\?"),
    "short option": (["train", "mace", "--epochs", "1"], r"no option --epochs .*--train.epochs\?"),
    "value": (["train", "mace", "--optim.lr", "x"], "--optim.lr: expected a number, got 'x'"),
    "range": (["train", "mace", "--optim.lr", "-1"], "optim.lr: expected a number above 0"),
    "choice": (["train", "mace", "--train.dtype", "half"], "--train.dtype: expected one of"),
    "no value": (["train", "mace", "--train.epochs"], "--train.epochs: expected a value"),
    "weight": (["train", "mace", "--loss.energy-weight", "-1"], "loss.energy_weight: expected 0"),
    "group's weight": (
        ["train", "mace", "--data.labels.group-weights", "slabs", "-2"],
        "--data.labels.group-weights: expected 0 or more for the group 'slabs', got -2",
    ),
    "one of several types": (
        ["train", "mace", "--data.e0", "{H: -13.6}"],
        "isolated or pairs of a name and a number without braces, got '{H: -13.6}'",
    ),
    "number or word": (
        ["train", "mace", "--batch.capacity", "atoms", "many"],
        "or pairs of a name and a whole number without braces or auto, got 'atoms'",
    ),
    "pair": (["train", "mace", "--optim.betas", "1"], "--optim.betas: expected 2 values"),
    "pair of numbers": (["train", "mace", "--optim.betas", "a", "b"], "numbers, got 'a', 'b'"),
    "output": (["train", "mace", "--output", __file__], f"{__file__} is a file; name a folder"),
    "inside a file": (["train", "mace", "--output", f"{__file__}/run"], "is a file; name a folder"),
    "whole number": (["train", "mace", "--train.epochs", "2.5"], "expected a whole number"),
    "stray word": (["train", "mace", "stray"], "but 'stray'; `bevatron"),
    "file without its option": (
        ["train", "mace", __file__, __file__],
        rf" \(did you mean --data {__file__} {__file__}\?\); `bevatron train mace --help-all` sho",
    ),
    "nothing of that name to prepare": (
        ["prepare", "no-file", "--out", "s"],
        "no-file: the file does not exist",
    ),
    "required": (["prepare", "a.xyz", "--cutoff", "4"], "needs --out"),
    "number or none": (
        ["prepare", "a.xyz", "--out", "s", "--cutoff", "x"],
        "--cutoff: expected a number, got 'x'",
    ),
    "nothing to prepare": (["prepare", "--out", "s"], "expected at least one file"),
    "nothing to start from": (
        ["init", "water.yaml"],
        r"no recipe 'water.yaml' \(known: [a-z0-9, ]+\)$",
    ),
    "no recipe": (
        ["train"],
        r"needs a recipe \(alphafold2, alphafold3, gpspp, graph, mace\) or a YAML file",
    ),
    "two of three numbers": (
        ["train", "graph", "--data.read.random-split", "0.6", "0.2"],
        "--data.read.random-split: expected 3 numbers, got '0.6', '0.2'",
    ),
    "nothing": (["predict"], "needs MODEL, SOURCE, OUT"),
    "yaml missing": (["train", "no.yaml"], "no.yaml: cannot be read"),
    "no model": (["predict", "no-model", "a.xyz", "b.xyz"], "no-model: there is no such run"),
    "no model, option": (["predict", "no-model", "a", "b", "--mode", "3d"], "no such run or model"),
    "no model in": (["predict", ".", "a.xyz", "b.xyz"], "is not a model folder"),
    "no model in, option": (["evaluate", ".", "a.csv", "--mode", "3d"], "is not a model folder"),
    "no store": (["inspect", "no-store"], "there is no such store"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told_in_one_sentence(case, refused):
    arguments, sentence = MISTAKES[case]
    assert re.search(sentence, refused(*arguments))


BAD_YAML = {
    "data: {trains: [a]}": r"data.trains: unknown key \(did you mean 'train'\?\)",
    "optim: {lr: fast}": "optim.lr: expected a number, got 'fast'",
    "optim: {clip: .inf}": "optim.clip: expected a finite number, got inf",
    "optim: {lr: 1}\noptim: {lr: 2}": "line 2: .*'optim' occurs twice",
    "recipe: macee": "there is no 'macee'",
    "data: {train: [{{ file }}]}": "line 1: not valid YAML .*a template .*not been filled in",
    "data:\n  train:": "data.train: has no value; give a list, or take the key out",
    "preset:": "preset: has no value",
    "data: {e0: fitted}": "'auto', 'least_squares', 'isolated' or keys and values, got 'fitted'",
    "data: {labels: {group_weights: {a: -1}}}": "group-weights: expected 0 or more .*'a', got -1",
    "data: [": "not valid YAML",
    "just text": "expected keys and values",
}


@pytest.mark.parametrize("text", BAD_YAML)
def test_bad_yaml_is_refused_with_file_and_key(text, tmp_path, refused):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    said = refused("train", path)
    assert said.startswith(str(path))
    assert re.search(BAD_YAML[text], said)
