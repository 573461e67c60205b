"""Files and folders that are written in full or not at all, what a killed process left of them, and a lock on a folder
so that two processes do not write into it at once."""

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

LEFT = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)")  # what `replacing` and `replacing_folder` write first
EARLIER_LEFT = re.compile(r"\.(?P<name>.+)-[a-z0-9_]{8}")  # what `replacing_folder` wrote first in earlier versions
LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that have none


@contextlib.contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary path beside `file`, which becomes `file` when the block ends: also after a kill there is the old file
    or the new one. Raises OSError with the name of the file when the disk refuses it."""
    temporary = _temporary(file)
    try:
        with naming(file):
            yield temporary
            _share(temporary)
            sync(temporary)
            os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which takes its place, files that are not written anew included, when the
    block ends. After a kill `folder` is the old or the new one; between two renames it is missing, but never half:
    `sweep` puts it back. Raises OSError as `replacing`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = _temporary(folder)
    if beside.exists():  # of a killed process with the same number
        _settle(beside, folder)
    new = beside / "new"
    new.mkdir(parents=True)
    try:
        with naming(folder):
            yield new
            for path in (p for p in new.rglob("*") if p.is_file()):
                _share(path)
                sync(path)
            if folder.exists():
                folder.rename(beside / "old")
            new.rename(folder)
    finally:
        _settle(beside, folder)


@contextlib.contextmanager
def naming(file: Path) -> Iterator[None]:
    """Around writing `file`: a full disk and its like, in whatever way they are reported, become OSError with its
    name."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        number = _number(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(file)) from error


def sweep(folder: Path, name: str = "", earlier: bool = False) -> None:
    """Remove what killed processes were writing in `folder` (name: only in the place of that file or folder), and put a
    folder back that was about to be replaced.

    earlier: what earlier versions left, too, which does not tell its process: nothing else may write there now.
    """
    for path in sorted(folder.glob(".*")):
        match = LEFT.fullmatch(path.name)
        if match and match["name"] == (name or match["name"]):
            pid = int(match["pid"])
            if pid == os.getpid() or not _alive(pid):
                _settle(path, folder / match["name"])
        match = EARLIER_LEFT.fullmatch(path.name)
        if earlier and match and path.is_dir() and {p.name for p in path.iterdir()} <= {"new", "old"}:
            _settle(path, folder / match["name"])


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove(path: Path) -> None:
    """Delete a file, or a folder with what it holds."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _settle(beside: Path, target: Path) -> None:
    """Delete what was written first. A target that is missing since its old folder was moved away is the new one, which
    was complete by then, or the old one."""
    if (beside / "old").is_dir() and not target.exists():
        (beside / ("new" if (beside / "new").is_dir() else "old")).rename(target)
    remove(beside)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _share(file: Path) -> None:
    """Give a file the permissions of any new file of the user: safetensors makes private ones."""
    mask = os.umask(0o077)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def _number(error: Exception) -> int | None:
    """The number of the system's error in a failed write; None for other errors, and those that name their file."""
    if isinstance(error, SafetensorError):  # which has it as text
        found = re.search(r"\(os error (\d+)\)", str(error))
        return int(found[1]) if found else None
    if isinstance(error, RuntimeError):  # torch.save into an open file
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
    """The lock of `folder`: a file with the number of the process and its machine, locked as long as it lives.

    The system gives the lock of a process that died back, so that its file alone holds nobody up. Processes that were
    started by the one with the lock do not have it.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock, making the folder. Raises ValueError when another process has it."""
        self.folder, self.file = folder, folder / LOCK
        self.made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        self.opened = self._take()
        while not self._is_there():  # its last owner deleted it in between
            self.opened.close()
            self.opened = self._take()
        self.opened.truncate(0)
        self.opened.write(f"process {os.getpid()} on {socket.gethostname()}")
        self.opened.flush()

    def release(self) -> None:
        """Give it back, and delete its file, and the folder if it was made for it and is empty."""
        if self.opened.closed:
            return
        self.file.unlink(missing_ok=True)
        self.opened.close()
        if self.made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()

    def _take(self) -> TextIO:
        opened = self.file.open("a+")
        try:
            fcntl.lockf(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in NO_LOCKS:
                print(f"{self.folder} lies on a file system without locks: start no second run in it", flush=True)
                return opened
            opened.seek(0)
            owner = opened.read() or "another process"
            opened.close()
            raise ValueError(
                f"{self.folder} is in use by {owner}: wait until that ends, or choose another folder"
            ) from error
        return opened

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.opened.fileno()), self.file.stat())
        except FileNotFoundError:
            return False
