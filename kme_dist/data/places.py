"""Storage locations: a local folder, file://, s3:// or gs://. The only module that imports obstore.

`Place.of(path)` converts a path or an address to a folder of objects: bytes by key, written atomically, with
create-if-absent to elect a single writer. Errors of disks and object stores are translated to ours: rejected
credentials or permissions are a ConfigError, a missing bucket is a DataError, a full disk or an unreachable store is a
RetryError. Only a missing object remains a FileNotFoundError, which the caller has to interpret.

Object stores are configured by their usual environment variables (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, AWS_REGION,
GOOGLE_APPLICATION_CREDENTIALS, ...); KME_STORE_RETRIES is the number of retries of a failed request.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kme_dist.errors import ConfigError, DataError, KMEError, RetryError

METADATA_KEY = "zarr.json"


@dataclass(frozen=True)
class Place:
    """A folder of objects under one address. Plain data: it can be pickled, and connects on first use."""

    address: str
    _cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Place, (self.address,))

    @classmethod
    def of(cls, path: str | os.PathLike[str] | Place) -> Place:
        if isinstance(path, Place):
            return path
        text = os.fspath(path)
        if not text:
            raise ConfigError("The path is empty; give a folder, or an s3:// or gs:// address.")
        scheme, separator, rest = text.partition("://")
        if not separator:
            return cls(os.path.abspath(os.path.expanduser(text)))
        if scheme == "file":
            return cls(os.path.abspath("/" + rest.lstrip("/")))
        if scheme not in ("s3", "gs"):
            raise ConfigError(
                f"{text}: {scheme}:// addresses are not supported; use a local path, file://, s3:// or gs://."
            )
        if "@" in rest.partition("/")[0]:
            raise ConfigError(
                f"{scheme}://...@{rest.partition('@')[2]}: an address is logged, so it must not contain credentials; "
                "use the environment, e.g. AWS_ACCESS_KEY_ID."
            )
        if not rest.strip("/"):
            raise ConfigError(f"{text}: a bucket name is missing after {scheme}://.")
        if importlib.util.find_spec("obstore") is None:
            raise ConfigError(
                f"{text}: object stores require the package obstore; install it with `pip install 'kme-dist[s3]'`."
            )
        return cls(f"{scheme}://{rest.strip('/')}")

    @property
    def is_local(self) -> bool:
        return "://" not in self.address

    @property
    def path(self) -> Path:
        if not self.is_local:
            raise ConfigError(f"{self.address} is not a local path, which is required here.")
        return Path(self.address)

    @property
    def name(self) -> str:
        return self.address.rstrip("/").rsplit("/", 1)[-1]

    def sibling(self, name: str) -> Place:
        return Place(f"{self.address.rstrip('/').rsplit('/', 1)[0]}/{name}")

    def child(self, name: str) -> Place:
        return Place(f"{self.address}/{name}")

    def __str__(self) -> str:
        return self.address

    def client(self) -> Any:
        if "store" not in self._cache:
            self._cache["store"] = _connect(self.address)
        return self._cache["store"]

    def read(self, key: str, start: int | None = None, length: int | None = None) -> bytes:
        """The bytes of one object, or `length` of them from `start` (negative: counted from the end).

        FileNotFoundError if it does not exist; fewer bytes than requested if the object is shorter.
        """
        with store_errors(self):
            if self.is_local:
                if not (self.path / key).is_file():
                    raise FileNotFoundError(f"{self.path / key}")
                with open(self.path / key, "rb", buffering=0) as file:
                    if start is None:
                        return file.readall() or b""
                    size = os.fstat(file.fileno()).st_size
                    begin = max(0, size + start) if start < 0 else start
                    count = size - begin if length is None else length
                    parts, at = [], begin
                    while count > 0 and (part := os.pread(file.fileno(), count, at)):
                        parts.append(part)
                        at, count = at + len(part), count - len(part)
                    return parts[0] if len(parts) == 1 else b"".join(parts)
            import obstore
            import obstore.exceptions

            if start is None:
                return bytes(obstore.get(self.client(), key).bytes())
            if start < 0:
                return bytes(obstore.get(self.client(), key, options={"range": {"suffix": -start}}).bytes())
            if length is None:
                return bytes(obstore.get(self.client(), key, options={"range": {"offset": start}}).bytes())
            try:
                return bytes(obstore.get_range(self.client(), key, start=start, length=length)) if length else b""
            except obstore.exceptions.GenericError:
                if int(obstore.head(self.client(), key)["size"]) >= start + length:
                    raise
                return b""  # the object is too short for the range: damaged, reported by the caller

    def write(
        self,
        key: str,
        data: bytes | list[Any],
        *,
        only_if_absent: bool = False,
        sync: bool = True,
    ) -> bool:
        """Store one object atomically; False if `only_if_absent` and the object exists. `data` may be a list of
        buffers. Without `sync` a power failure may lose it (the death of the process does not)."""
        parts = data if isinstance(data, list) else [data]
        with store_errors(self):
            if self.is_local:
                target = self.path / key
                target.parent.mkdir(parents=True, exist_ok=True)
                aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
                try:
                    with open(aside, "wb") as file:
                        file.writelines(parts)
                        if sync:
                            file.flush()
                            os.fsync(file.fileno())
                    if only_if_absent:
                        os.link(aside, target)
                    else:
                        os.replace(aside, target)
                    if sync:
                        _sync_folder(target.parent)  # or the name itself may be lost
                except FileExistsError:
                    return False
                finally:
                    aside.unlink(missing_ok=True)
                return True
            return self._put(key, parts, "create" if only_if_absent else "overwrite") is not None

    def compare_and_write(self, key: str, data: bytes | list[Any], seen: str | None) -> str | None:
        """Object stores: store one object if its version is still `seen` (None: if it does not exist). Returns the new
        version, or None if another writer was faster."""
        with store_errors(self):
            parts = data if isinstance(data, list) else [data]
            return self._put(key, parts, "create" if seen is None else {"e_tag": seen})

    def _put(self, key: str, parts: list[Any], mode: Any) -> str | None:
        """The version of the object that was stored; None if the condition of `mode` is not met."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            return str(obstore.put(self.client(), key, b"".join(parts), mode=mode)["e_tag"])
        except (AlreadyExistsError, PreconditionError, FileExistsError):
            return None
        except FileNotFoundError:
            if mode not in ("create", "overwrite"):
                return None
            raise

    def version(self, key: str) -> str | None:
        """The entity tag of an object in an object store; None if it does not exist."""
        import obstore

        try:
            with store_errors(self):
                return str(obstore.head(self.client(), key)["e_tag"])
        except FileNotFoundError:
            return None

    def exists(self, key: str = METADATA_KEY) -> bool:
        if self.is_local:
            return (self.path / key).exists()
        return self.version(key) is not None

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Every object below `prefix` with its size in bytes; empty if there is none."""
        with store_errors(self):
            if self.is_local:
                root = self.path / prefix
                found: dict[str, int] = {}
                for folder, _, names in os.walk(root):
                    base = os.path.relpath(folder, self.path)
                    for name in names:
                        key = name if base == "." else f"{base}/{name}"
                        with contextlib.suppress(FileNotFoundError):  # renamed or removed since it was listed
                            found[key] = os.stat(os.path.join(folder, name)).st_size
                return found
            import obstore

            listing = obstore.list(self.client(), prefix=prefix or None)
            return {entry["path"]: int(entry["size"]) for page in listing for entry in page}

    def folders(self) -> list[str]:
        """In an object store: the names of the folders right below this one."""
        import obstore

        with store_errors(self):
            return [path.rstrip("/") for path in obstore.list_with_delimiter(self.client())["common_prefixes"]]

    def delete(self, key: str) -> None:
        with store_errors(self):
            if self.is_local:
                (self.path / key).unlink(missing_ok=True)
                return
            import obstore

            with contextlib.suppress(FileNotFoundError):
                obstore.delete(self.client(), key)

    def move(self, key: str, target: str) -> bool:
        """On a local disk: give an object another name, atomically; False if it does not exist."""
        with store_errors(self):
            own, new = self.path / key, self.path / target
            for attempt in range(2):
                try:
                    os.replace(own, new)
                    return True
                except FileNotFoundError:
                    if attempt == 0:
                        new.parent.mkdir(parents=True, exist_ok=True)
            return False

    def delete_below(self, prefix: str) -> None:
        """Remove all objects in one folder of this place."""
        with store_errors(self):
            if self.is_local:
                shutil.rmtree(self.path / prefix, ignore_errors=True)
                return
            import obstore

            keys = list(self.sizes(f"{prefix}/"))
            if keys:
                obstore.delete(self.client(), keys)

    def delete_others(self, kept: str) -> None:
        """Remove everything except one object."""
        with store_errors(self):
            if not self.is_local:
                import obstore

                keys = [key for key in self.sizes() if key != kept]
                if keys:
                    obstore.delete(self.client(), keys)
                return
            for entry in os.scandir(self.path):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                elif entry.name != kept:
                    os.unlink(entry.path)

    def delete_all(self) -> None:
        """Remove everything, starting with the metadata that make it readable."""
        with store_errors(self):
            if self.is_local:
                (self.path / METADATA_KEY).unlink(missing_ok=True)
                shutil.rmtree(self.path, ignore_errors=True)
                return
            import obstore

            self.delete(METADATA_KEY)
            keys = list(self.sizes())
            if keys:
                obstore.delete(self.client(), keys)

    def move_objects(self, target: Place, last: str, still_held: Callable[[], None]) -> None:
        """Move all objects to another place in the same bucket, `last` last, replacing what is there. `still_held` is
        called before each change, and raises if the target has another writer by now."""
        import obstore

        keys = sorted(self.sizes(), key=lambda key: (key == last, key))
        still_held()
        target.delete_all()
        home = self.sibling("")
        with store_errors(self):
            for key in keys:
                still_held()
                obstore.copy(Place.of(home.address).client(), f"{self.name}/{key}", f"{target.name}/{key}")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network disks have no such thing
            raise
    finally:
        os.close(descriptor)


def _connect(address: str) -> Any:
    import datetime

    from obstore.store import from_url

    options: dict[str, Any] = {}
    if address.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        if endpoint:
            options["endpoint"] = endpoint
        if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
            options["region"] = "us-east-1"
    plain_http = str(options.get("endpoint", "")).startswith("http://")
    retries: Any = {
        "max_retries": int(os.environ.get("KME_STORE_RETRIES", "5")),
        "retry_timeout": datetime.timedelta(seconds=60),
    }
    client: Any = {"allow_http": True} if plain_http else {}
    with store_errors(Place(address)):
        return from_url(address, retry_config=retries, client_options=client, **options)


@contextlib.contextmanager
def store_errors(place: Place | str) -> Iterator[None]:
    """Translate errors of disks and object stores to ours; FileNotFoundError is passed on to the caller."""
    try:
        yield
    except KMEError:
        raise
    except FileNotFoundError as error:
        if "NoSuchBucket" in str(error):
            raise _store_error(place, error) from None
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise RetryError(
                f"{place}: no space left while writing ({error.strerror}). Nothing incomplete was published; "
                "free some space and run the same command again."
            ) from error
        if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise ConfigError(f"{place}: a file or folder is in the way ({error}). Choose another path.") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise ConfigError(
                f"{place}: {error.strerror}. Choose a writable folder, or fix its permissions."
            ) from error
        raise _store_error(place, error) from error
    except Exception as error:  # errors of obstore, identified by name: it may not be installed
        if type(error).__module__.startswith(("obstore", "builtins")) and _is_store_error(error):
            translated = _store_error(place, error)
            if isinstance(translated, FileNotFoundError):
                raise translated from None
            raise translated from error
        raise


def _is_store_error(error: BaseException) -> bool:
    if "obstore" not in sys.modules:
        return False
    from obstore.exceptions import BaseError

    return isinstance(error, BaseError)


def _store_error(place: Place | str, error: BaseException) -> Exception:
    kind, text = type(error).__name__, " ".join(str(error).split())[:300]
    if kind == "NotFoundError" and "NoSuchBucket" not in text:
        return FileNotFoundError(f"{place}: {text}")
    if "NoSuchBucket" in text:
        return DataError(f"{place}: the bucket does not exist; create it or correct its name.")
    denied = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "AccessDenied", "403 Forbidden", "401 Unauthorized")
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or any(word in text for word in denied):
        return ConfigError(
            f"{place}: the object store rejected the credentials. Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
            f"AWS_SESSION_TOKEN (or the role of this machine) and the bucket's policy. It said: {text}"
        )
    if "credential" in text.lower() or "169.254.169.254" in text:
        return ConfigError(
            f"{place}: no credentials were found. Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or "
            f"AWS_SKIP_SIGNATURE=true for a public bucket). The store client said: {text}"
        )
    return RetryError(f"{place}: the store could not be reached or failed ({kind}: {text}). Try again later.")
