"""Atomic writes, one-sentence errors, what a command prints and its exit code."""

import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

from topr.io import InputError, atomic, check_folder, first_line, lock, write_text
from topr.io.commands import OUT_OF_MEMORY, ArgumentParser, command, printable


def names(folder) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_file_appears_under_its_name_when_it_is_complete(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with atomic(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
        temporary.write_text("whole")
        written = temporary.stat().st_ino
    assert path.stat().st_ino == written  # renamed: a copy would be seen half done
    assert path.read_text() == "whole" and names(path.parent) == {"a.txt"}


def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_other(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic(path) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and names(tmp_path) == {"a.txt"}
    write_text(path, "new")
    assert path.read_text() == "new" and names(tmp_path) == {"a.txt"}


def test_a_model_replaces_a_model_and_no_other_folder(tmp_path):
    precious, model = tmp_path / "precious", tmp_path / "model"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years")
    with pytest.raises(InputError, match="will not be overwritten"), atomic(precious) as folder:
        folder.mkdir()
    assert (precious / "thesis.txt").read_text() == "years"
    for content in ("first", "second"):
        with atomic(model) as folder:
            folder.mkdir()
            (folder / "config.json").write_text(content)
    assert (model / "config.json").read_text() == "second" and names(tmp_path) == {
        "precious",
        "model",
    }
    with pytest.raises(RuntimeError), atomic(model) as folder:
        folder.mkdir()
        raise RuntimeError
    assert (model / "config.json").read_text() == "second" and names(tmp_path) == {
        "precious",
        "model",
    }


def test_a_process_killed_while_it_writes_leaves_the_old_file_and_the_next_write_sweeps(tmp_path):
    path = tmp_path / "a.txt"
    write_text(path, "old")
    killed = f"""
import os, signal
from topr.io import atomic
with atomic({str(path)!r}) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", killed], cwd=ROOT).returncode == -signal.SIGKILL
    assert path.read_text() == "old" and len(names(tmp_path)) == 2
    write_text(path, "new")
    assert path.read_text() == "new" and names(tmp_path) == {"a.txt"}


def test_locking_a_folder_removes_what_killed_processes_left(tmp_path):
    for name in (".policy.tmp", "policy", ".hidden"):
        (tmp_path / "run" / name).mkdir(parents=True)
    lock(tmp_path)
    assert names(tmp_path / "run") == {"policy", ".hidden"}


def test_a_place_that_takes_no_file_is_rejected_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="--out: .*cannot be written"):
        check_folder("--out:", tmp_path / "file" / "below")
    check_folder("--out:", tmp_path / "folder" / "below")
    assert names(tmp_path) == {"file"}


def test_a_command_ends_with_one_sentence_for_bad_input_alone(capsys):
    for sentence, printed in (
        ("a is 1\x1b[2J\nb", "error: a is 1\\x1b[2J b\n"),
        ("x", "error: x\n"),
    ):
        with pytest.raises(SystemExit) as end, command():
            raise InputError(sentence)
        assert (end.value.code, capsys.readouterr().err) == (2, printed)
    with pytest.raises(RuntimeError), command():
        raise RuntimeError("a bug keeps its traceback")


def test_text_is_printable_and_shortened():
    assert printable("ab\x00\u202e\tc\n", 100) == "ab\\x00\\u202e\tc\n"
    assert printable("a" * 100, 100) == "a" * 100
    assert printable("a" * 100 + "b" * 5, 100) == "a" * 100 + "…"


def test_a_librarys_message_gives_its_first_line():
    assert first_line(ValueError("\nwrong\nand more")) == "wrong"
    assert first_line(KeyError()) == "KeyError"


def test_an_input_error_is_found_inside_a_librarys():
    try:
        try:
            raise InputError("ours")
        except InputError as error:
            raise TypeError("theirs") from error
    except TypeError as error:
        assert first_line(error) == "ours"
    assert first_line(TypeError("theirs")) == "theirs"


def test_running_out_of_memory_is_recognised():
    for error in (
        MemoryError(),
        RuntimeError("CUDA out of memory."),
        RuntimeError("can't allocate memory"),
    ):
        assert re.search(OUT_OF_MEMORY, repr(error))
    assert not re.search(OUT_OF_MEMORY, repr(RuntimeError("size mismatch")))


def test_a_parser_names_the_wrong_argument_in_one_sentence():
    parser = ArgumentParser()
    parser.add_argument("--samples", type=int, default=1)
    for arguments in (["--samples", "x"], ["--samplers", "3"], ["--sample", "3"]):
        with pytest.raises(InputError) as caught:
            parser.parse_args(arguments)
        sentence = str(caught.value)
        assert "--sample" in sentence or '"samples"' in sentence, sentence
        assert sentence.endswith(" (--help lists every argument)") and "\n" not in sentence
    assert parser.parse_args(["--samples", "3"]).samples == 3


def test_a_folder_takes_one_writer(tmp_path):
    code = f"from topr.io import lock; lock({str(tmp_path)!r})"
    other = [sys.executable, "-c", code]
    assert subprocess.run(other, cwd=ROOT).returncode == 0  # its lock ended with it
    held = lock(tmp_path)
    done = subprocess.run(other, cwd=ROOT, capture_output=True, text=True)
    assert "another process is writing to" in done.stderr
    held.close()
    assert subprocess.run(other, cwd=ROOT).returncode == 0
