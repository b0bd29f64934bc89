"""What a shell, a terminal and a file system do to a command."""

import gzip
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bevatron.cli import main
from bevatron.train.signals import StopRequests
from cli_runs import CUTOFF, TINY

PLAIN_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shell(command, folder, *prefix, **variables):
    """Runs a line of bash in which ``bevatron`` is the command."""
    program = f'bevatron() {{ {sys.executable} -m bevatron "$@"; }}; {command}'
    return subprocess.run(
        [*prefix, "bash", "-c", program],
        capture_output=True,
        cwd=folder,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        check=False,
    )


@pytest.mark.parametrize(
    "command",
    [
        "bevatron inspect store --out $OUT | true; exit ${PIPESTATUS[0]}",
        "bevatron inspect store --out $OUT >&-",
        "bevatron inspect store --out $OUT 2>&-",
    ],
)
def test_a_command_does_its_work_whoever_reads_what_it_prints(command, shelf, tmp_path):
    done = shell(command, shelf, OUT=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "inspect.html").is_file()


def test_help_that_cannot_be_printed_is_one_sentence(tmp_path):
    done = shell("bevatron --help > /dev/full", tmp_path)
    assert done.returncode == 2
    assert done.stderr == b"error: No space left on device\n"


@pytest.mark.parametrize("variables", [PLAIN_C, {"PYTHONIOENCODING": "ascii"}, {}])
def test_names_may_have_any_letters_whatever_the_locale(variables, structures, tmp_path):
    for name in ("größe", os.fsdecode(b"gr\xf6\xdfe")):
        file, out = tmp_path / f"{name}.xyz", tmp_path / name
        file.hardlink_to(structures)
        for command in ("prepare $FILE --out $OUT --cutoff 3.0 --workers 1", "bench store $OUT"):
            done = shell(
                f"bevatron {command}",
                tmp_path,
                FILE=str(file),
                OUT=str(out),
                **variables,
            )
            assert done.returncode == 0, done.stderr


def test_a_module_of_the_current_folder_is_not_taken_for_one_of_ours(structures, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('not this one')")
    script = tmp_path / "bin" / "command.py"  # its folder is in the path, the current one is not
    script.parent.mkdir()
    script.write_text("import sys\nfrom bevatron.cli import main\nsys.exit(main())\n")
    options = ["--data", structures, "--output", "run", "--loader.workers", "1", *TINY]
    done = subprocess.run(
        [sys.executable, script, "train", "mace", *options],
        cwd=tmp_path,
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_home_folder_is_found_where_no_shell_did(shelf, structures, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    prepared = ["prepare", f"~/{structures.name}", "--out=~/store", "--cutoff", CUTOFF]
    assert main([*prepared, "--workers", "1"]) == 0
    written = {"recipe": "mace", "output": "~/run", "data": {"train": ["~/store"]}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(written))
    assert main(["train", "run.yaml", *TINY]) == 0
    assert (tmp_path / "run" / "model.json").is_file()
    assert main(["evaluate", "~/run", "~/store"]) == 0
    assert not (tmp_path / "~").exists()


def test_a_name_that_begins_with_a_dash_is_no_option(
    shelf, structures, tmp_path, monkeypatch, refused
):
    monkeypatch.chdir(tmp_path)
    structures.rename(tmp_path / "-new.xyz")
    said = refused("predict", shelf / "run", "-new.xyz", "out.xyz")
    assert said == "-new.xyz: is taken for an option; write ./-new.xyz"
    assert main(["predict", str(shelf / "run"), "--", "-new.xyz", "out.xyz"]) == 0


def test_what_is_longer_than_a_name_of_a_file_may_be_is_no_file(refused):
    assert refused("train", "mace", "A" * 400).startswith("nothing was expected after the options")


def test_predict_blames_the_file_that_cannot_be_read(shelf, tmp_path, refused, monkeypatch):
    whole = gzip.compress((shelf / "data.xyz").read_bytes())
    (tmp_path / "cut.xyz.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "folder").mkdir()
    (tmp_path / "locked.xyz").write_text("1\n")

    really, blocked = Path.open, tmp_path / "locked.xyz"

    def opened(path, *given, **named):
        if path == blocked:
            raise PermissionError(13, "Permission denied", str(path))
        return really(path, *given, **named)

    monkeypatch.setattr(Path, "open", opened)
    for name, found in (
        ("cut.xyz.gz", "cannot be read to the end (Compressed file ended"),
        ("folder", "is a folder, expected a file of structures"),
        ("locked.xyz", "cannot be read (Permission denied)"),
    ):
        said = refused("predict", shelf / "run", tmp_path / name, tmp_path / "out.xyz")
        assert said.startswith(f"{tmp_path / name}: {found}")


def test_a_run_leaves_the_files_of_others_in_its_folder(train, tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("notes.tmp", "log.txt.0123abcd.tmp"):
        (tmp_path / "run" / name).write_text("mine, or left by a kill")
    assert train() == 0
    assert (tmp_path / "run" / "notes.tmp").is_file()
    assert not (tmp_path / "run" / "log.txt.0123abcd.tmp").exists()


def test_nohup_keeps_a_closed_terminal_from_stopping_a_run():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequests() as stops:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stops.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
