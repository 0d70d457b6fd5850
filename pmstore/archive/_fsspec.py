"""Every target that fsspec reaches as a place of objects. fsspec is imported when such a place is made."""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from pmstore._errors import ArchiveDamagedError, ArchiveUnavailableError
from pmstore.archive._place import (
    NAME,
    TEMPORARY,
    Buffer,
    MissingObjectError,
    ObjectError,
    ObjectExistsError,
    Place,
    ShortObjectError,
    check_range,
    checked,
    code_of,
    too_large,
    unavailable,
)

# Whose objects appear whole; on the others they are written under a temporary name and moved.
_WHOLE = {"memory", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "cos", "tos", "r2", "hf"}
_S3 = ("s3", "s3a")  # s3fs and botocore try calls again, each by itself: 25 times
_RENAMING = {"local", "sftp", "ssh", "ftp", "smb"}  # that rename a file, or raise an error
_ABOUT_NAMES = {
    errno.ENOENT: FileNotFoundError,
    errno.ENOTDIR: NotADirectoryError,
    errno.EEXIST: FileExistsError,
}
_SECRET = 4  # characters: words that lack a shorter one would tell it, so that it is hidden only in "user:password@"
_UNASKED = 1 << 26  # more is not read before it is known to exist: a size from elsewhere may lie
_creating = threading.Lock()  # memory: and targets without an atomic creation, at least within this process


class FsspecPlace(Place):
    """A target that fsspec reaches.

    `create` is atomic where the target offers it to fsspec (``pipe_file(mode="create")``, as on S3). Elsewhere the
    place asks whether the object exists and then writes it, and of two processes at once both may succeed. Object
    stores show an object only when it is whole. On other targets, such as sftp, it is moved to its name from a
    temporary one; whether it survives a power cut of the target is the target's matter.

    Some file systems connect when they are made. If that fails, each call tries again, and after any other failure
    the next call connects anew.
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        self.url, self._hidden = _shown(url)
        self._given, self._options = url, storage_options
        self._protocol = url.partition("://")[0].lower()
        self._tries_once = False
        self._pid = -1
        try:
            self._connect()
        except (ImportError, ValueError, MemoryError):
            raise
        except Exception:  # the target can't be reached
            pass

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self._given, self._options, self._tries_once)

    @property
    def once(self) -> Place:
        is_single = self._tries_once or self._protocol not in _S3
        return self if is_single else _again(self._given, self._options, True)

    def _connect(self) -> tuple[Any, Any]:
        """The file system, and one that tries a creation once only; new ones in a forked child, and after a failure."""
        if self._pid != os.getpid():
            fsspec = _imported(self.url)
            try:
                self._fs, path = fsspec.core.url_to_fs(self._given, skip_instance_cache=True, **self._options)
                self._once = self._fs
                if self._protocol in _S3:  # its second try would meet the object of its first one
                    config = {"retries": {"total_max_attempts": 1}} | dict(self._options.get("config_kwargs") or {})
                    options = self._options | {"config_kwargs": config}
                    self._once, _ = fsspec.core.url_to_fs(self._given, skip_instance_cache=True, **options)
                    self._once.retries = 1
                if self._tries_once:
                    self._fs = self._once
            except ImportError as error:
                raise _not_installed(self.url, error) from error
            except (TypeError, ValueError) as error:  # an option is wrong, or missing
                raise ValueError(f"{self.url}: {self._plain(str(error))}") from None
            self._root = str(path).rstrip("/")
            self._pid = os.getpid()
        return self._fs, self._once

    def put(self, name: str, data: Sequence[Buffer]) -> None:
        path = self._path(name)
        with self._refusals(name, "written"):
            self._place(path, _joined(data), replaces=True)

    def create(self, name: str, data: Sequence[Buffer]) -> None:
        path = self._path(name)
        with self._refusals(name, "created"):
            _, fs = self._connect()
            joined = _joined(data)
            atomic = self._protocol != "memory" and self._protocol in _WHOLE and _creates(fs)
            with contextlib.nullcontext() if atomic else _creating:
                fs.invalidate_cache()
                if _has(fs, path):  # asked in each case: some servers ignore the condition of the creation
                    raise ObjectExistsError(name, self.url)
                if not atomic:
                    self._place(path, joined, replaces=False)
                    return
                try:
                    fs.pipe_file(path, joined, mode="create")
                except OSError as error:
                    response = getattr(error.__cause__, "response", None) or {}
                    if response.get("Error", {}).get("Code") == "PreconditionFailed":
                        raise ObjectExistsError(name, self.url) from None
                    raise

    def get(self, name: str, at: int = 0, count: int | None = None) -> bytes:
        check_range(at, count)
        path = self._path(name)
        with self._refusals(name, "read"):
            fs, _ = self._connect()
            if count == 0 or (at and count is None) or (count or 0) > _UNASKED:
                size = self.size(name)  # S3 refuses a range that begins at the end
                if at + (count or 0) > size:
                    raise ShortObjectError(name, self.url)
                if at == size or count == 0:
                    return b""
                count = size - at if count is None else count
            try:
                found = fs.cat_file(path) if count is None else fs.cat_file(path, start=at, end=at + count)
            except IsADirectoryError:
                raise MissingObjectError(name, self.url) from None
            except MemoryError:
                raise too_large(self.url, name) from None
            except OSError as error:
                if error.errno == errno.EINVAL and at >= self.size(name):
                    raise ShortObjectError(name, self.url) from None
                raise
            if count is not None:
                if len(found) > count:  # a server over HTTP may answer with the whole object
                    found = found[at : at + count]
                if len(found) < count:
                    raise ShortObjectError(name, self.url)
            return bytes(found)

    def size(self, name: str) -> int:
        path = self._path(name)
        with self._refusals(name, "read"):
            fs, _ = self._connect()
            fs.invalidate_cache()
            known = fs.info(path)
            if known["type"] != "file":
                raise MissingObjectError(name, self.url)
            return int(known["size"])

    def list(self, folder: str) -> list[str]:
        return list(self.sizes(folder))

    def sizes(self, folder: str) -> dict[str, int]:
        path = self._path(folder) if folder else self._reached("")
        with self._refusals(folder, "listed"):
            fs, _ = self._connect()
            fs.invalidate_cache()
            try:
                with _by_number():
                    entries = fs.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            found = {}
            for entry in entries:
                within, _, name = entry["name"].rpartition("/")
                if entry["type"] == "file" and within.strip("/") == path.strip("/") and NAME.fullmatch(name):
                    found[name] = entry["size"]
            return dict(sorted(found.items()))

    def delete(self, names: Iterable[str]) -> None:
        paths = [self._path(name) for name in names]
        if not paths:
            return
        with self._refusals("", "deleted from"):
            fs, _ = self._connect()
            if self._protocol in _S3 and not set("*?[") & set(self._root):
                fs.rm(paths)  # a thousand in one request
                return
            for path in paths:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError), _by_number():
                    fs.rm_file(path)

    def _path(self, name: str) -> str:
        checked(name)
        return f"{self._reached(name)}/{name}"

    def _reached(self, name: str) -> str:
        """The folder of the target, once that is reached."""
        with self._refusals(name, "reached"):
            self._connect()
        return self._root

    def _place(self, path: str, data: bytes, *, replaces: bool) -> None:
        fs = self._fs
        if self._protocol in _WHOLE:
            fs.pipe_file(path, data)
            return
        folder = path.rpartition("/")[0]
        temporary = f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        fs.makedirs(folder, exist_ok=True)
        try:
            fs.pipe_file(temporary, data)
            self._rename(temporary, path, replaces)
        except BaseException:
            with contextlib.suppress(Exception):
                fs.rm_file(temporary)
            raise

    def _rename(self, temporary: str, path: str, replaces: bool) -> None:
        """Give a file its name. Some targets refuse one that is taken, and fsspec's webhdfs drops that answer."""
        fs = self._fs
        with contextlib.suppress(FileExistsError), _by_number():
            if self._has_moved(temporary, path):
                return
        if replaces:
            with contextlib.suppress(FileNotFoundError), _by_number():
                fs.rm_file(path)
        elif _has(fs, path):  # another writer was quicker
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if not self._has_moved(temporary, path):
            raise OSError(errno.EIO, "a file was not renamed, and the target gave no reason")

    def _has_moved(self, temporary: str, path: str) -> bool:
        """Rename a file, and return whether it was. Targets that would have raised an error are not asked."""
        fs = self._fs
        if type(fs).mv is _imported(self.url).AbstractFileSystem.mv:  # the same, but names may look like patterns
            fs.cp_file(temporary, path)
            fs.rm_file(temporary)
            return True
        fs.mv(temporary, path)
        if self._protocol in _RENAMING:
            return True
        fs.invalidate_cache()
        return not _has(fs, temporary)

    @contextlib.contextmanager
    def _refusals(self, name: str, doing: str) -> Iterator[None]:
        try:
            with _by_number():
                yield
        except (ObjectError, ArchiveUnavailableError, ArchiveDamagedError):
            raise
        except ImportError as error:
            raise _not_installed(self.url, error) from error
        except FileExistsError as error:
            if doing == "created":
                raise ObjectExistsError(name, self.url) from None
            raise self._unavailable(name, doing, error) from error
        except (FileNotFoundError, NotADirectoryError) as error:
            if doing == "read":
                raise MissingObjectError(name, self.url) from None
            raise self._unavailable(name, doing, error, transient=False) from error
        except (TypeError, AttributeError, NameError, LookupError, ArithmeticError, AssertionError, MemoryError):
            raise
        except Exception as error:
            if self._protocol not in _WHOLE and not isinstance(error, PermissionError):
                self._pid = -1  # a connection, as of sftp, may be gone for good: the next call makes another one
            raise self._unavailable(name, doing, self._in_words(name, error)) from error

    def _in_words(self, name: str, error: Exception) -> Exception:
        """The refusal with its reason. S3 answers a HEAD without one, and is then asked for a byte of the object."""
        if self._protocol not in _S3 or not name or code_of(error) not in ("400", "403"):
            return error
        try:
            self._fs.cat_file(f"{self._root}/{name}", start=0, end=1)
        except Exception as told:
            if code_of(told) not in ("416", "InvalidRange"):  # the object is empty
                return told
        return OSError(errno.EAGAIN, "S3 refused a request, and answers the next one")

    def _unavailable(
        self, name: str, doing: str, error: Exception, *, transient: bool | None = None
    ) -> ArchiveUnavailableError:
        return unavailable(self.url, name, doing, error, transient=transient, shown=self._plain)

    def _plain(self, text: str) -> str:
        """A text of fsspec without the credentials of the URL."""
        for secret, shown in self._hidden:
            text = text.replace(secret, shown)
        return text


class _AtOnce(ThreadPoolExecutor):
    """Runs each function in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


def go_on_at_exit() -> None:
    """Let file systems connect while Python exits: it has ended all executors, and asyncio looks up names in one."""
    asyn = sys.modules.get("fsspec.asyn")
    loop = None if asyn is None else asyn.loop[0]
    if loop is not None:
        loop.call_soon_threadsafe(loop.set_default_executor, _AtOnce())


def _again(url: str, options: dict[str, Any], once: bool) -> FsspecPlace:
    place = FsspecPlace(url, **options)
    if once:
        place._tries_once, place._pid = True, -1  # it connects anew
    return place


def _shown(url: str) -> tuple[str, list[tuple[str, str]]]:
    """A URL without credentials, and what other texts show instead of them."""
    protocol, _, rest = url.partition("://")
    before, at, _host = rest.partition("/")[0].rpartition("@")
    rest = rest[len(before) + len(at) :]
    query = rest.partition("?")[2]
    hidden = [(f"{before}@", "***@")] if before else []
    hidden += [(part, "***") for part in (before, before.partition(":")[2], query) if len(part) >= _SECRET]
    return f"{protocol}://{rest.partition('?')[0].rstrip('/')}", hidden


def _imported(url: str) -> Any:
    try:
        import fsspec
        import fsspec.core
    except ImportError as error:
        raise _not_installed(url, error) from error
    return fsspec


def _not_installed(url: str, error: ImportError) -> ImportError:
    text = f"{url} can't be used: {error}"
    s3 = url.partition("://")[0] in ("s3", "s3a")
    if s3 or (error.name or "").partition(".")[0] == "fsspec":
        text += ". pip install 'pmstore[archive]' installs fsspec"
    if s3:
        text += "; S3 needs s3fs, too: pip install s3fs"
    return ImportError(text, name=error.name)


@contextlib.contextmanager
def _by_number() -> Iterator[None]:
    """Errors about a name as Python has them. Those of smbprotocol have a number, and a class of their own."""
    try:
        yield
    except OSError as error:
        if error.errno not in _ABOUT_NAMES or isinstance(error, _ABOUT_NAMES[error.errno]):
            raise
        raise _ABOUT_NAMES[error.errno](error.errno, error.strerror) from error


def _has(fs: Any, path: str) -> bool:
    """Whether there is such a file. The `exists` of most file systems takes any failure for an answer."""
    try:
        with _by_number():
            fs.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _creates(fs: Any) -> bool:
    """Whether pipe_file can create; some implementations ignore a mode that they don't know."""
    return "mode" in inspect.signature(getattr(fs, "_pipe_file", fs.pipe_file)).parameters


def _joined(data: Sequence[Buffer]) -> bytes:
    return data[0] if len(data) == 1 and isinstance(data[0], bytes) else b"".join(data)
