"""Files that only this user and root can change, because code is loaded from them."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path


class NotPrivateError(PermissionError):
    """Another user could change a file; the message says by which folder or file."""


def check_folder(path: Path, *, make: bool = False, may_be_sticky: bool = False) -> None:
    """Checks that no other user can change what the absolute path of a folder leads to.

    This user or root must own every folder and link on the way, and others must not write to a folder, except to a
    sticky one above the last, in which they cannot replace what is not theirs. The path is followed from the root on,
    so each part is looked up in a folder that has passed.

    Args:
      path: the folder.
      make: whether missing folders are made, for this user alone.
      may_be_sticky: whether the last folder may be a sticky one, too.

    Raises:
      ValueError: the path is relative.
      NotPrivateError: another user owns a part of the path, or may write to it.
      OSError: a folder is missing, or cannot be made.
    """
    if not path.is_absolute():
        raise ValueError(f"the path must be absolute, got {path}: make it so")
    for part in (*reversed(path.parents), path):
        try:
            status = os.lstat(part)
        except FileNotFoundError:
            if not make:
                raise
            with contextlib.suppress(FileExistsError):  # another process has just made it
                os.mkdir(part, 0o700)
            status = os.lstat(part)
        may_be_sticky_here = may_be_sticky or part != path
        is_link = stat.S_ISLNK(status.st_mode)
        _check(part, status, is_shared=is_link or bool(may_be_sticky_here and status.st_mode & stat.S_ISVTX))
        if is_link:
            os.stat(part)  # raises for a link that leads nowhere or to itself
            check_folder(part.parent / os.readlink(part), may_be_sticky=may_be_sticky_here)


def open_file(path: Path) -> int:
    """Opens a file that no other user can change, by its absolute path, for reading, and returns its descriptor.

    Raises:
      ValueError: the path is relative.
      NotPrivateError: another user owns the file or a part of its path, or may write to it.
      OSError: the file cannot be opened, or is a link.
    """
    check_folder(path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        _check(path, os.fstat(descriptor), is_shared=False)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def make_private(path: Path) -> None:
    """Takes the permissions of a file or folder of this user from all others.

    Raises:
      OSError: this is not possible, or the path is a link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        os.fchmod(descriptor, os.fstat(descriptor).st_mode & 0o700)
    finally:
        os.close(descriptor)


def _check(path: Path, status: os.stat_result, *, is_shared: bool) -> None:
    """Raises NotPrivateError if another user owns `path` or, unless it is shared, may write to it."""
    mode = status.st_mode
    owned = status.st_uid in (0, os.geteuid())
    by_others = mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private_group(status.st_gid))
    if not owned or (by_others and not is_shared):
        raise NotPrivateError(
            f"{path} (user {status.st_uid}, mode {stat.S_IMODE(mode):o}) belongs to another user, or others may write "
            "to it"
        )


def _is_private_group(number: int) -> bool:
    """Returns whether a group has this user alone. Many systems make one for each user, of the same name."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:
        return False
    is_own = user.pw_uid != 0 and (user.pw_gid, user.pw_name) == (group.gr_gid, group.gr_name)
    return is_own and set(group.gr_mem) <= {user.pw_name}
