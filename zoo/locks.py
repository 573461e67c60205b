"""A lock on a folder, so that two processes do not write into it at once."""

import contextlib
import errno
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

LOCK = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # of file systems that have none


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
