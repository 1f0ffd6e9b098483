"""Reading the files that a command names and writing the ones it makes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from meshwright.specs import files as specs_files
from meshwright.specs.errors import Fault, SpecError


def read_text(path: str, pointer: str = "") -> str:
    """The text of a regular UTF-8 file of at most :data:`~meshwright.specs.files.MAX_BYTES`; ``-`` is standard input.

    Raises :class:`SpecError` at ``pointer`` if there is no such file, it is a directory, too large or unreadable.
    """
    if path == "-":
        if sys.stdin is None:
            raise SpecError(Fault(pointer, "standard input is closed"))
        raw = sys.stdin.buffer.read(specs_files.MAX_BYTES + 1)
        if len(raw) > specs_files.MAX_BYTES:
            raise SpecError(Fault(pointer, f"standard input is larger than {specs_files.MAX_BYTES} bytes"))
        try:
            return raw.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise SpecError(Fault(pointer, f"standard input is not UTF-8 text (byte {error.start})")) from None
    try:
        return specs_files.read_text(path)
    except SpecError as error:
        raise SpecError(Fault(pointer + f.pointer, f.message, f.alternatives) for f in error.faults) from None


def require_file_place(path: str, pointer: str = "/output") -> None:
    """:class:`SpecError` where no file can be written to ``path``; nothing is written."""
    place = Path(path)
    try:
        if not path:
            reason = "is empty; a file name is needed"
        elif path == "-":
            reason = "is no file name; --json prints the document on standard output"
        elif place.is_dir():
            reason = f"{path} is a folder; a file name is needed"
        elif not place.parent.is_dir():
            reason = f"cannot write {path}: there is no folder {place.parent}"
        elif not os.access(place if place.exists() else place.parent, os.W_OK):
            reason = f"cannot write {path}: permission denied"
        else:
            return
    except (OSError, ValueError) as error:  # a null character, a name too long
        reason = f"cannot write {path}: {error.strerror if isinstance(error, OSError) else error}"
    raise SpecError(Fault(pointer, reason))


def require_folder(folder: str, pointer: str) -> None:
    """:class:`SpecError` where no files can be written into ``folder``, which need not exist; nothing is written."""
    try:
        if not folder:
            raise SpecError(Fault(pointer, "is empty; a folder is needed"))
        if folder == "-":
            raise SpecError(Fault(pointer, "is no folder; meshwright export --json prints the files"))
        nearest = Path(folder).absolute()
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir():
            raise SpecError(Fault(pointer, f"{nearest} is a file; a folder is needed"))
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise SpecError(Fault(pointer, f"cannot write into {nearest}: permission denied"))
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(Fault(pointer, f"cannot write into {folder}: {reason}")) from None


def write_file(path: str, text: str, pointer: str = "/output") -> None:
    """Write ``text`` to ``path``; :class:`SpecError` where that cannot be."""
    require_file_place(path, pointer)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(Fault(pointer, f"cannot write {path}: {reason}")) from None


def write_folder(folder: str, files: Mapping[str, str], *, force: bool, pointer: str = "/output") -> list[Path]:
    """Write ``files`` (relative names) into ``folder``, which is made if needed; returns the paths.

    Nothing is written outside the folder, and nothing is overwritten without ``force``: all names are checked first.
    Scripts (``.sh``, ``.sbatch``) are made executable.
    """
    root = Path(folder)
    targets: dict[Path, str] = {}
    for name, text in files.items():
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise SpecError(Fault(pointer, f"the file name {name!r} leaves the folder"))
        targets[root.joinpath(*relative.parts)] = text
    try:
        if root.exists() and not root.is_dir():
            raise SpecError(Fault(pointer, f"{folder} is a file; a folder is needed"))
        if not force:
            clashes = [str(path) for path in targets if path.exists() or path.is_symlink()]
            if clashes:
                raise SpecError([Fault(pointer, f"{path} exists; use --force to replace it") for path in clashes])
        real = root.resolve()
        for path, text in targets.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.parent.resolve().is_relative_to(real):
                raise SpecError(Fault(pointer, f"{path} leads out of {folder} by a link"))
            if path.is_symlink():
                path.unlink()
            path.write_text(text, encoding="utf-8")
            if path.suffix in (".sh", ".sbatch"):
                path.chmod(path.stat().st_mode | 0o111 & ~_umask())
    except (OSError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(Fault(pointer, f"cannot write into {folder}: {reason}")) from None
    return list(targets)


def _umask() -> int:
    """The process's umask; reading it means setting it, so it is put back at once."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
