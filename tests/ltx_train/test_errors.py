"""Messages stay one line under 120 letters whatever is named in them; refused file operations become words."""

import errno
import os

import pytest

from ltx_train.errors import LINE, ConfigError, LtxTrainError, explain_os_error, one_line


def test_a_short_message_stays_as_it_is():
    error = ConfigError("a.b", "lora.rank is 0.", "Give 2 or more.")
    assert (error.message, error.hint, str(error)) == ("lora.rank is 0.", "Give 2 or more.", "lora.rank is 0.\nGive 2 or more.")


@pytest.mark.parametrize("name", ["/data/" + "ö" * 300 + "/model.safetensors", "x" * 250 + ".safetensors"])
def test_a_long_path_is_shortened_in_its_middle_and_stands_whole_in_the_hint(name):
    error = LtxTrainError("a.b", f"There is no file {name} for a sample.", "Correct the path.")
    assert len(error.message) <= LINE and error.message.startswith("There is no file ") and error.message.endswith(".safetensors for a sample.")
    assert f"There is no file {name} for a sample." in error.hint and error.hint.endswith("Correct the path.")


def test_many_words_lose_their_end_and_lines_are_joined():
    assert one_line("word " * 60).endswith("...") and len(one_line("word " * 60)) == LINE
    assert one_line("first\nsecond") == "first second"
    assert "\n" not in LtxTrainError("a.b", "name\nwith a line").message


REFUSED = {
    errno.ENOSPC: "disk.full", errno.EACCES: "file.permission", errno.EPERM: "file.permission", errno.EROFS: "file.read_only", errno.ENAMETOOLONG: "file.name_too_long",
    errno.ENOENT: "file.missing", errno.EISDIR: "file.is_folder", errno.ENOTDIR: "file.no_folder", errno.EEXIST: "file.exists", errno.EIO: "disk.error",
}  # fmt: skip


@pytest.mark.parametrize("number", REFUSED)
def test_refused_file_operations_have_words(number):
    error = explain_os_error(OSError(number, os.strerror(number), "/disk/file.txt"))
    assert error.code == REFUSED[number] and "/disk/file.txt" in error.message and error.hint and error.exit_code == 2


def test_a_rename_names_where_it_goes_and_a_nameless_absence_is_our_own_fault():
    assert "target" in explain_os_error(OSError(errno.EISDIR, "", ".target.tmp", None, "target")).message
    assert explain_os_error(OSError(errno.ENOENT, "No such file")) is None and explain_os_error(OSError(errno.EBADF, "x")) is None
