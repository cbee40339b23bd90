"""Where the files of a data set come from: folders, the web, a package.

Each reader returns `{file name: content}` or raises `SourceError` with the
reason, so that a loader can try one after the other and say why each failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

# A host that does not answer is given up soon, since another source follows;
# a slow one gets time for a few megabytes.
CONNECT_SECONDS = 10.0
DOWNLOAD_SECONDS = 90.0
MAX_DOWNLOAD_BYTES = 64 * 2**20

Files = Mapping[str, bytes]


class SourceError(Exception):
    """Why one source could not give the files."""


class DataNotFoundError(FileNotFoundError):
    """No source could give the data; the message says why, one by one."""


def read_folder(folder: Path, forms: Sequence[Sequence[str]]) -> Files:
    """The files of the first form that is complete in `folder`.

    Args:
        folder: Looked into, and then its sub-folder `ml-100k`, which is what
            unpacking the published archive leaves.
        forms: Each form is a list of file names.

    Raises:
        SourceError: No such folder, or no form is complete.
    """
    if not folder.is_dir():
        raise SourceError(
            "it is not a folder" if folder.exists() else "it does not exist"
        )
    for place in (folder, folder / "ml-100k"):
        for names in forms:
            if all((place / name).is_file() for name in names):
                try:
                    return {n: (place / n).read_bytes() for n in names}
                except OSError as error:
                    raise SourceError(f"cannot read: {error}") from error
    wanted = " or ".join(", ".join(names) for names in forms)
    present = [n for names in forms for n in names if (folder / n).is_file()]
    only = f"; of these only {', '.join(present)}" if present else ""
    raise SourceError(f"it does not hold {wanted}{only}")


def download(url: str) -> bytes:
    """What `url` answers.

    Raises:
        SourceError: The host cannot be reached, is too slow, or answers with
            an error or more than `MAX_DOWNLOAD_BYTES`.
    """
    give_up = time.monotonic() + DOWNLOAD_SECONDS
    received = io.BytesIO()
    try:
        with urllib.request.urlopen(url, timeout=CONNECT_SECONDS) as answer:
            while chunk := answer.read(2**18):
                received.write(chunk)
                if received.tell() > MAX_DOWNLOAD_BYTES:
                    raise SourceError(
                        f"the answer is larger than {MAX_DOWNLOAD_BYTES} bytes"
                    )
                if time.monotonic() > give_up:
                    raise SourceError(
                        f"not received in {DOWNLOAD_SECONDS:.0f} s"
                    )
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise SourceError(f"{reason}") from error
    return received.getvalue()


def download_wheel(requirement: str) -> bytes:
    """The wheel of `requirement`, from the package index that pip uses.

    It is read, never installed, and nothing of it is run.

    Raises:
        SourceError: There is no pip, or it failed; holds pip's last error.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *_pip(),
            "download",
            "--quiet",
            "--no-input",
            "--disable-pip-version-check",
            "--no-deps",
            "--only-binary=:all:",
            "--retries=1",
            f"--timeout={CONNECT_SECONDS:.0f}",
            f"--dest={folder}",
            requirement,
        ]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=DOWNLOAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise SourceError(
                f"pip download took more than {DOWNLOAD_SECONDS:.0f} s"
            ) from error
        except OSError as error:
            raise SourceError(f"cannot run pip: {error}") from error
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            lines = done.stderr.strip().splitlines() or ["no message"]
            errors = [line for line in lines if line.startswith("ERROR")]
            raise SourceError(f"pip download: {(errors or lines)[-1]}")
        return wheels[0].read_bytes()


def _pip() -> list[str]:
    """How to call pip: this Python's, else the one on the path."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    for name in ("pip3", "pip"):
        if found := shutil.which(name):
            return [found]
    raise SourceError(f"{sys.executable} has no pip, nor has the path")


def check_digest(content: bytes, algorithm: str, expected: str) -> None:
    """Raises `SourceError` unless `content` has the published checksum."""
    # MD5 is what the publisher gives; it guards against damage here, no more.
    found = hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()
    if found != expected:
        raise SourceError(
            f"{algorithm} checksum is {found}, expected {expected}: the file "
            "is damaged or has been changed"
        )


def unpack(archive: bytes, names: Sequence[str]) -> Files:
    """The files called `names`, in whichever folder of a zip archive.

    Raises:
        SourceError: Not a zip archive, or a file is not in it.
    """
    files = {}
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            for member in opened.namelist():
                name = PurePosixPath(member).name
                if name in names:
                    files[name] = opened.read(member)
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise SourceError(f"not a readable zip archive: {error}") from error
    if missing := [name for name in names if name not in files]:
        raise SourceError(f"the archive does not hold {', '.join(missing)}")
    return files


def replace_file(path: Path, content: bytes) -> None:
    """Writes `path` so that a reader sees the old or the new content whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{path.name}."
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files that only their owner may read.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
