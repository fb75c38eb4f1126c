"""What counts as a whole checkpoint, whatever happened to it or to the process that wrote it."""
import itertools
import os
import sys

import pytest

from megatron_longstraw.mcore import checkpoint_folder
from megatron_longstraw.mcore.checkpoint_folder import (
    begin, candidates, measure, newest_whole, partial_path, prune, publish, sweep,
)  # fmt: skip

FILES = {"__0_0.distcp": b"weights" * 20, "__1_0.distcp": b"moments" * 30, ".metadata": b"where"}


def write_files(folder, iteration):
    partial = begin(folder, iteration)
    for name, data in FILES.items():
        (partial / name).write_bytes(data)
    return measure(partial, 0, 1)


def write(folder, iteration):
    publish(folder, iteration, write_files(folder, iteration), {"steps": iteration})


@pytest.fixture
def folder(tmp_path):
    for iteration in (1, 2):
        write(tmp_path, iteration)
    return tmp_path


def flip(path):
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 2]) + data[1:])


DAMAGES = {
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 209 bytes, not 210"),
    "one bit flipped": (flip, "has changed since it was written (checksum)"),
    "missing": (lambda path: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_it_is_said_why(damage, folder):
    harm, words = DAMAGES[damage]
    path = folder / "iter_0000002" / "__1_0.distcp"
    harm(path)
    found, notes = newest_whole(folder)
    assert found.iteration == 1 and notes == [notes[0]]
    assert notes[0].startswith(f"checkpoint iter_0000002 is damaged: {path} {words}")


def ends_at(line, action):
    """Run it in a process that ends, as if killed, at the line-th line of checkpoint_folder.py that it comes to;
    whether it did."""
    pid = os.fork()
    if pid == 0:
        left = line

        def trace(frame, event, argument):
            nonlocal left
            if frame.f_code.co_filename != checkpoint_folder.__file__:
                return None
            left -= event == "line"
            if left == 0:
                os._exit(1)
            return trace

        try:
            sys.settrace(trace)
            action()
            os._exit(0)
        finally:
            os._exit(2)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 1)
    return status == 1


@pytest.mark.parametrize("written_before", [False, True])
def test_a_process_that_ends_anywhere_leaves_a_whole_checkpoint(written_before, tmp_path):
    """The one before, or the new one; and the next run writes it again."""
    newest = set()
    for line in itertools.count(1):
        folder = tmp_path / str(line)
        folder.mkdir()
        write(folder, 1)
        if written_before:  # the run went back behind it
            write(folder, 2)
            (folder / checkpoint_folder.TRACKER).write_text("1")

        files = write_files(folder, 2)

        def end_of_step():
            publish(folder, 2, files, {"steps": 2})
            prune(folder, 1, None)

        if not ends_at(line, end_of_step):
            break
        found, notes = newest_whole(folder)
        assert notes == [] and found.damage() is None
        newest.add(found.iteration)
        sweep(folder)
        write(folder, 2)
        assert newest_whole(folder)[0].iteration == 2 and not list(folder.glob(".iter*"))
    assert newest == {1, 2} and [checkpoint.iteration for checkpoint in candidates(folder)] == [2]


def test_a_sweep_takes_what_is_half_and_nothing_else(folder):
    (partial_path(folder, 3)).mkdir()
    (folder / ".iter_0000001.removed").mkdir()
    sweep(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["iter_0000001", "iter_0000002", checkpoint_folder.TRACKER]


def test_a_folder_that_is_gone_is_not_made_anew(tmp_path):
    with pytest.raises(FileNotFoundError):
        begin(tmp_path / "gone", 1)
