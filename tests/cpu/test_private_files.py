"""Tests that files are opened only where no other user can change them."""

import grp
import os
import pwd
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from torch_bridge import private_files
from torch_bridge.private_files import NotPrivateError

ROOT = Path(__file__).resolve().parents[2]
OTHER = 12345  # a user and a group that no test runs as
two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def home(tmp_path):
    """Returns a folder of this user."""
    folder = tmp_path / "home"
    folder.mkdir(mode=0o700)
    return folder


def path_in(home, *names):
    """Returns the path of a file, which is made with its folders."""
    path = home.joinpath(*names)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(b"data")
    path.chmod(0o600)
    return path


def read(path):
    with open(private_files.open_file(path), "rb") as file:
        return file.read()


def another_owner(path):
    os.chown(path, OTHER, OTHER)


def another_owner_in_a_sticky_folder(path):
    """Another user has made the folder in which this user then makes the rest."""
    another_owner(path.parent.parent)
    path.parent.parent.parent.chmod(0o1777)


def another_owner_of_the_file(path):
    another_owner(path)
    path.chmod(0o644)


def another_owner_of_the_folder(path):
    another_owner(path.parent)


def a_group_that_may_write_above(path):
    os.chown(path.parent.parent, 0, OTHER)
    path.parent.parent.chmod(0o770)


def a_group_that_may_write_to_the_file(path):
    os.chown(path, 0, OTHER)
    path.chmod(0o664)


def a_link_of_another_user(path):
    moved = path.parent.rename(path.parent.with_name("moved"))
    path.parent.symlink_to(moved)
    os.chown(path.parent, OTHER, OTHER, follow_symlinks=False)


def a_link_into_a_folder_of_another_user(path):
    foreign = path.parent.parent.with_name("foreign")
    foreign.mkdir()
    path.parent.symlink_to(path.parent.rename(foreign / "moved"))
    another_owner(foreign)


OWNERS = (
    another_owner_in_a_sticky_folder, another_owner_of_the_file, another_owner_of_the_folder,
    a_group_that_may_write_above, a_group_that_may_write_to_the_file, a_link_of_another_user,
    a_link_into_a_folder_of_another_user,
)  # fmt: skip


@two_users
@pytest.mark.parametrize("change", OWNERS, ids=lambda change: change.__name__)
def test_what_another_user_could_change_is_not_opened(change, home):
    path = path_in(home, "a", "b", "file")
    assert read(path) == b"data"
    change(path)
    with pytest.raises(NotPrivateError, match="belongs to another user, or others may write to it"):
        read(path)


@pytest.mark.parametrize(
    ("of", "mode"), [("..", 0o777), ("..", 0o772), (".", 0o777), (".", 0o1777), (".", 0o720), ("file", 0o606)]
)
def test_what_others_may_write_to_is_not_opened(of, mode, home):
    path = path_in(home, "a", "b", "file")
    path.parent.joinpath(of).chmod(mode)
    with pytest.raises(NotPrivateError, match=rf"mode {mode:o}\) belongs to another user, or others may write to it"):
        read(path)


def test_links_of_this_user_and_sticky_folders_above_are_followed(home):
    path = path_in(home, "a", "b", "file")
    home.chmod(0o1777)
    (home / "link").symlink_to("a/../a")
    (home / "a" / "link").symlink_to(home / "link" / "b")
    assert read(home / "link" / "link" / "file") == read(home / "a" / "b" / ".." / "b" / "file") == b"data"
    path.chmod(0o644)
    assert read(path) == b"data"


def test_relative_paths_raise(home, monkeypatch):
    """The folders above the working directory would not be checked."""
    path_in(home, "a", "file")
    monkeypatch.chdir(home)
    for path in ("a/file", "file", "../home/a/file"):
        with pytest.raises(ValueError, match="the path must be absolute"):
            read(Path(path))
    for path in (".", "a", "new"):
        with pytest.raises(ValueError, match="the path must be absolute"):
            private_files.check_folder(Path(path), make=True)
    assert not (home / "new").exists()


def test_a_link_in_place_of_the_file_and_links_that_lead_nowhere_raise(home):
    path = path_in(home, "a", "file")
    (home / "a" / "link").symlink_to(path)
    (home / "loop").symlink_to("loop")
    (home / "nowhere").symlink_to("missing")
    for link in ("a/link", "loop/file", "nowhere/file"):
        with pytest.raises(OSError, match=r"Too many levels of symbolic links|No such file") as raised:
            read(home / link)
        assert not isinstance(raised.value, NotPrivateError)
    with pytest.raises(OSError, match="No such file"):
        private_files.check_folder(home / "nowhere" / "new", make=True)


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_missing_folders_are_made_for_this_user_alone(umask, home):
    before = os.umask(umask)
    try:
        private_files.check_folder(home / "a" / "b" / "c", make=True)
    finally:
        os.umask(before)
    made = [home / "a", home / "a" / "b", home / "a" / "b" / "c"]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 3
    with pytest.raises(FileNotFoundError):
        private_files.check_folder(home / "d")


@two_users
def test_nothing_is_made_in_a_folder_of_another_user(home):
    another_owner(home)
    with pytest.raises(NotPrivateError):
        private_files.check_folder(home / "a", make=True)
    assert not list(home.iterdir())


@two_users
def test_the_user_is_the_effective_one():
    """A program with the rights of another user trusts that user, and not the one who started it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        path = path_in(Path(folder), "a", "file")
        for owned in (path.parent, path):
            another_owner(owned)
        code = f"""
import os
from pathlib import Path
from torch_bridge import private_files
path = Path({str(path)!r})
os.setresuid(54321, {OTHER}, 0)
os.close(private_files.open_file(path))
os.seteuid(0)
os.setresuid({OTHER}, 54321, 0)
try:
    private_files.open_file(path)
except PermissionError:
    print("refused")
"""
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr


def test_the_group_that_a_user_has_alone_may_write(home, monkeypatch):
    """Where users have private groups, the umask is often 002."""
    path = path_in(home, "a", "file")
    path.parent.chmod(0o775)
    path.chmod(0o664)
    number = path.stat().st_gid
    me = SimpleNamespace(pw_uid=1000, pw_gid=number, pw_name="me")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: me)
    for name, members, passes in (("me", [], True), ("me", ["me"], True), ("me", ["me", "x"], False), ("x", [], False)):
        group = SimpleNamespace(gr_gid=number, gr_name=name, gr_mem=members)
        monkeypatch.setattr(grp, "getgrgid", lambda _, group=group: group)
        if passes:
            assert read(path) == b"data"
        else:
            with pytest.raises(NotPrivateError):
                read(path)
    monkeypatch.undo()
    path.parent.chmod(0o777)
    with pytest.raises(NotPrivateError):
        read(path)


def test_permissions_are_taken_from_others(home):
    path = path_in(home, "a", "file")
    path.parent.chmod(0o777)
    path.chmod(0o666)
    for changed in (path.parent, path):
        private_files.make_private(changed)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700 and stat.S_IMODE(path.stat().st_mode) == 0o600
    target = path_in(home, "target")
    target.chmod(0o644)
    (home / "link").symlink_to(target)
    with pytest.raises(OSError, match="Too many levels"):
        private_files.make_private(home / "link")
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_refused_file_is_closed(home):
    path = path_in(home, "file")
    path.chmod(0o666)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(NotPrivateError):
            read(path)
    assert len(os.listdir("/proc/self/fd")) == before
