"""Atomic writes of files and folders, cleanup after killed processes, and locks on folders."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from safetensors import SafetensorError

# names of temporary files and folders of `replacing` and `replacing_folder`
LEFT = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)")
EARLIER_LEFT = re.compile(r"\.(?P<name>.+)-[a-z0-9_]{8}")  # names of temporary folders in earlier versions
LOCK = ".lock"
RUN_CONFIG = "config.yaml"  # in each run folder
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # errors of file systems that have no locks


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Context with a temporary path in the folder of `file`, which is renamed to `file` at the end, so that a crash
    leaves the old file or the new one. Raises OSError with the name of the file if it cannot be written."""
    temporary = _temporary(file)
    try:
        with naming(file):
            yield temporary
            _set_default_mode(temporary)
            sync(temporary)
            os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def is_missing_run(path: str | Path) -> bool:
    """Whether `path` does not exist and is no name on the hub, since it is in `runs` or in a folder that holds runs."""
    path = Path(path)
    return not path.exists() and (path.parts[:1] == ("runs",) or any(path.parent.glob(f"*/{RUN_CONFIG}")))


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """Context with an empty temporary folder that replaces `folder`, with all its files, at the end.

    A crash leaves the old folder or the new one. A crash between the two renames leaves neither, until `sweep` restores
    one. Raises OSError as `replacing`.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(folder)
    if temporary.exists():  # left by a killed process that had the same id
        _discard(temporary, folder)
    new = temporary / "new"
    new.mkdir(parents=True)
    try:
        with naming(folder):
            yield new
            for path in (p for p in new.rglob("*") if p.is_file()):
                _set_default_mode(path)
                sync(path)
            if folder.exists():
                folder.rename(temporary / "old")
            new.rename(folder)
    finally:
        _discard(temporary, folder)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Context in which `file` is written. Errors of the disk, which safetensors and torch report as other exceptions,
    are raised as OSError with the name of the file."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        number = _errno(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(file)) from error


def sweep(folder: Path, name: str = "", earlier: bool = False) -> None:
    """Remove temporary files and folders that killed processes left in `folder`, and restore a folder whose replacement
    was interrupted.

    name: name of the file or folder whose temporary files to remove; empty for all.  earlier: also sweep sub-folders,
    and remove temporary folders of earlier versions, whose names have no process id. No other process may write into
    `folder` meanwhile.
    """
    for path in sorted(folder.glob(".*")):
        match = LEFT.fullmatch(path.name)
        if match and match["name"] == (name or match["name"]):
            pid = int(match["pid"])
            if pid == os.getpid() or not _alive(pid):
                _discard(path, folder / match["name"])
        match = EARLIER_LEFT.fullmatch(path.name)
        if earlier and match and path.is_dir() and {p.name for p in path.iterdir()} <= {"new", "old"}:
            _discard(path, folder / match["name"])
    for inside in filter(Path.is_dir, folder.glob("*") if earlier else ()):
        sweep(inside)


def sync(path: Path) -> None:
    """Flush a file, or the list of files of a folder, to the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _discard(temporary: Path, target: Path) -> None:
    """Delete a temporary file or folder. If `target` is missing, since its old folder was moved already, first restore
    it from the new folder, which is complete by then, or from the old one."""
    if (temporary / "old").is_dir() and not target.exists():
        (temporary / ("new" if (temporary / "new").is_dir() else "old")).rename(target)
    remove(temporary)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _set_default_mode(file: Path) -> None:
    """Give a file the default permissions of new files, since safetensors creates files that only the owner can
    read."""
    mask = os.umask(0o077)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def _errno(error: Exception) -> int | None:
    """Return the errno of a failed write; None for other errors and for errors that name their file already."""
    if isinstance(error, SafetensorError):  # its message contains the errno
        found = re.search(r"\(os error (\d+)\)", str(error))
        return int(found[1]) if found else None
    if isinstance(error, RuntimeError):  # raised by torch.save on an open file
        return error.__context__.errno if isinstance(error.__context__, OSError) else None
    assert isinstance(error, OSError)
    return error.errno if error.filename is None else None


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


class FolderLock:
    """A lock on `folder`: a locked file that contains the process id and the host name.

    The operating system releases the lock when the process dies, so that a file left behind does no harm. Child
    processes do not inherit the lock.
    """

    def __init__(self, folder: Path) -> None:
        """Create the folder and take the lock. Raises ValueError if another process has it."""
        self.folder, self.file = folder, folder / LOCK
        self.made = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        self.opened = self._acquire()
        while not self._has_file():  # the previous owner has deleted the file meanwhile
            self.opened.close()
            self.opened = self._acquire()
        self.opened.truncate(0)
        self.opened.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.opened.flush()

    def release(self) -> None:
        """Release the lock and delete its file, and the folders that were created for the lock and are empty."""
        if self.opened.closed:
            return
        self.file.unlink(missing_ok=True)
        self.opened.close()
        with contextlib.suppress(OSError):
            for path in self.made:
                path.rmdir()

    def _acquire(self) -> TextIO:
        opened = self.file.open("a+")
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                print(f"{self.folder} is on a file system without locks: do not start a second run in it", flush=True)
                return opened
            opened.seek(0)
            owner = opened.read() or "another process"
            opened.close()
            raise ValueError(
                f"{self.folder} is in use by {owner}: wait until that ends, or choose another folder"
            ) from error
        return opened

    def _has_file(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.opened.fileno()), self.file.stat())
        except FileNotFoundError:
            return False
