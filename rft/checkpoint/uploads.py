"""Large objects on their way into S3, in parts.

    bytes of a file ─► parts of `part` bytes ─► complete: the object is there, as a whole
                           │ an agent dies, a connection is cut
                           └─► the next one of the same object lists what is up, and goes on

In: an s3fs file system and the place of a job in its bucket. Invariants: nothing of an upload can
be seen before it is complete; a part that is up already is taken only where its MD5 is that of the
bytes that would go up now. What nobody goes on with is ended by `end_all`, at the start of the next
attempt: until then a store keeps the parts, and bills them.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

log = logging.getLogger(__name__)
PART = 32 * 2**20  # bytes of a part; S3 takes none below 5 MiB but the last
MOST_PARTS = 10_000  # of one object: S3's limit
PATIENCE_S = 120.0  # for one request that the client library has already tried several times
AGAIN_S = 1.0


@contextlib.contextmanager
def medium(what: str) -> Iterator[None]:
    """Clients of object stores have errors of their own; callers know OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{what}: {error}") from error


class Uploads:
    """Requests that only S3 has, below `root` ("bucket/prefix")."""

    def __init__(self, fs: Any, root: str, part: int = PART, patience_s: float = PATIENCE_S):
        self.part, self.patience_s = part, patience_s
        self._fs = fs
        self._bucket, self._prefix, _ = fs.split_path(root.rstrip("/"))

    def key(self, path: str) -> str:
        return "/".join(filter(None, (self._prefix, path)))

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One request about the bucket. Raises OSError; FileNotFoundError where nothing is."""
        with medium(f"s3://{self._bucket}"):
            return dict(self._fs.call_s3(method, Bucket=self._bucket, **arguments))

    def size(self, path: str) -> int:
        """By one request, which lists nothing: what was put can be seen here at once."""
        return int(self.call("head_object", Key=self.key(path))["ContentLength"])

    def open(self, path: str = "") -> list[dict[str, Any]]:
        """Uploads that are not complete, of keys that begin with `path`."""
        found: list[dict[str, Any]] = []
        more: dict[str, Any] = {}
        while True:
            page = self.call("list_multipart_uploads", Prefix=self.key(path), **more)
            found += page.get("Uploads", [])
            if not page.get("IsTruncated"):
                return found
            more = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }

    def parts(self, key: str, upload: str) -> dict[int, tuple[str, int]]:
        """(ETag, bytes) of those that are up, by number."""
        found: dict[int, tuple[str, int]] = {}
        more: dict[str, Any] = {}
        while True:
            page = self.call("list_parts", Key=key, UploadId=upload, **more)
            for part in page.get("Parts", []):
                found[part["PartNumber"]] = (part["ETag"], part["Size"])
            if not page.get("IsTruncated"):
                return found
            more = {"PartNumberMarker": page["NextPartNumberMarker"]}

    def end(self, key: str, upload: str) -> None:
        """Its parts are given back; one that has ended is no error."""
        with contextlib.suppress(FileNotFoundError):
            self.call("abort_multipart_upload", Key=key, UploadId=upload)

    def end_all(self, is_ours: Callable[[str], bool]) -> int:
        """End every upload below the root whose path `is_ours`; how many there were."""
        count, below = 0, self.key("")
        for upload in self.open():
            if is_ours(upload["Key"][len(below) :].lstrip("/")):
                self.end(upload["Key"], upload["UploadId"])
                count += 1
        return count


class Upload:
    """One object of at most `size` bytes. A small one is a single put."""

    def __init__(self, uploads: Uploads, path: str, size: int):
        self._uploads, self._key, self._path = uploads, uploads.key(path), path
        self._part = max(uploads.part, -(-size // MOST_PARTS))
        self._buffer = bytearray()
        self._id = ""
        self._etags: list[str] = []  # of the parts that are up
        self._there: dict[int, tuple[str, int]] = {}  # what an agent before this one put up
        self._bytes = 0

    def write(self, data: memoryview) -> None:
        while len(data):
            room = self._part - len(self._buffer)
            self._buffer += data[:room]
            data = data[room:]
            if len(self._buffer) == self._part:
                self._send()

    def close(self) -> None:
        """Returns when the object is there."""
        if not self._id:
            self._again(lambda: self._call("put_object", Body=bytes(self._buffer)))
            return
        if self._buffer:
            self._send()
        parts = [{"PartNumber": n, "ETag": etag} for n, etag in enumerate(self._etags, 1)]
        self._again(lambda: self._complete(parts))

    def abort(self) -> None:
        if self._id:
            with contextlib.suppress(OSError):  # the next start ends it
                self._uploads.end(self._key, self._id)

    def _send(self) -> None:
        if not self._id:
            self._begin()
        data, self._buffer = self._buffer, bytearray()
        number = len(self._etags) + 1
        etag, size = self._there.get(number, ("", 0))
        if size != len(data) or etag.strip('"') != hashlib.md5(data).hexdigest():
            sent = self._again(
                lambda: self._call(
                    "upload_part", UploadId=self._id, PartNumber=number, Body=bytes(data)
                )
            )
            etag = sent["ETag"]
        self._etags.append(etag)
        self._bytes += len(data)

    def _begin(self) -> None:
        """Go on with the newest upload of this object that was left, or begin one."""
        try:
            found = self._again(lambda: self._uploads.open(self._path))
            left = [one for one in found if one["Key"] == self._key]
        except PermissionError as error:  # who may write need not be allowed to list uploads
            log.warning("%s is uploaded from its beginning: %s", self._path, error)
            left = []
        left.sort(key=lambda one: str(one["Initiated"]))
        for one in left[:-1]:
            self._uploads.end(self._key, one["UploadId"])
        if left:
            self._id = left[-1]["UploadId"]
            self._there = self._again(lambda: self._uploads.parts(self._key, self._id))
            log.info("%s: %d parts are up already", self._path, len(self._there))
        else:
            begun = self._again(lambda: self._call("create_multipart_upload"))
            self._id = begun["UploadId"]

    def _complete(self, parts: list[dict[str, Any]]) -> None:
        try:
            self._call(
                "complete_multipart_upload", UploadId=self._id, MultipartUpload={"Parts": parts}
            )
        except FileNotFoundError:
            # done before, and the answer was lost; or somebody has ended it
            if self._uploads.size(self._path) != self._bytes:
                raise

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._uploads.call(method, Key=self._key, **arguments)

    def _again(self, act: Callable[[], Any]) -> Any:
        """What `act` returns. A store that is away for a while costs a wait, and nothing that is
        up; what it refuses is not asked for again.
        """
        end = time.monotonic() + self._uploads.patience_s
        while True:
            try:
                return act()
            except (FileNotFoundError, PermissionError):
                raise
            except OSError as error:
                if time.monotonic() > end:
                    raise
                log.warning("%s, part %d: %s; again", self._path, len(self._etags) + 1, error)
                time.sleep(AGAIN_S)
