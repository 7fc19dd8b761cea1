"""The MNIST handwritten digits as NumPy arrays: from a folder, the cache, a mirror, or offline.

`load` looks in this order and says in `Mnist.source` what it found:

1. the four IDX files in `data_dir`, when one is given (then nowhere else);
2. the user's cache, `$XDG_CACHE_HOME/distrib/mnist` or `~/.cache/distrib/mnist`;
3. a download from one of `MIRRORS` into that cache;
4. without network, the 1,797 real 8x8 digits that ship inside scikit-learn, enlarged to 28x28.

Files of the cache and of the mirrors are trusted only if the SHA-256 of their *decompressed*
content is the one in `SHA256`: mirrors may compress the same content differently. Nothing is
written into the cache before that check, and then only by an atomic rename.
"""

import gzip
import hashlib
import math
import os
import queue
import tempfile
import threading
import time
import types
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from absl import logging

MIRRORS: tuple[str, ...] = (
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
)
TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
# Of the decompressed IDX files.
SHA256: dict[str, str] = {
    TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
DEADLINE_SECONDS = 120.0  # For a whole download: 11 MB at 1 Mbit/s take 90 s.
ANSWER_SECONDS = 5.0  # To connect, and between two pieces of an answer.

_MAX_BYTES = 64 << 20  # No file of MNIST is larger, decompressed or not.
_PIECE_BYTES = 1 << 16
_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_OTHER_IDX_TYPES = {0x09: "int8", 0x0B: "int16", 0x0C: "int32", 0x0D: "float32", 0x0E: "float64"}
_KNOWN_STARTS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"PK\x03\x04": "a zip archive",
    b"<": "HTML or XML text",
    _GZIP_MAGIC: "gzip inside gzip",
}
_DIGITS_TRAIN = 1500  # Of scikit-learn's 1,797; the other 297 are the test set.


class MnistFileError(ValueError):
    """A file that is not what its name promises.

    Attributes:
        path: the file, as the message names it.
        expected: what should have been there.
        found: what was there.
    """

    def __init__(self, path: str | os.PathLike[str], expected: str, found: str):
        """Makes the message `path: expected ..., found ...`."""
        super().__init__(f"{os.fspath(path)}: expected {expected}, found {found}")
        self.path, self.expected, self.found = os.fspath(path), expected, found


@dataclass(frozen=True, eq=False)
class Mnist:
    """Handwritten digits, split for training and testing (60,000 and 10,000 for the real MNIST).

    Attributes:
        train_images: shape `[n, 28, 28, 1]`, float32 from 0 to 1.
        train_labels: shape `[n]`, int32 from 0 to 9.
        test_images: as `train_images`.
        test_labels: as `train_labels`.
        source: where the digits came from, in words.
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str


def load(
    data_dir: str | os.PathLike[str] | None = None,
    *,
    download: bool = True,
    mirrors: Sequence[str] = MIRRORS,
    deadline: float = DEADLINE_SECONDS,
) -> Mnist:
    """Loads MNIST, or without network the digits of scikit-learn and a warning that says so.

    Args:
        data_dir: folder with the four IDX files, each gzipped or not, also under the names with
            a dot (`train-images.idx3-ubyte`). Their digests are not compared, so that a data set
            of the same form can stand in. None: the cache, the mirrors, then scikit-learn.
        download: whether to ask the mirrors for what the cache lacks.
        mirrors: addresses of folders with the four gzipped files, tried in order.
        deadline: seconds for all downloads together. A mirror that says nothing for
            `ANSWER_SECONDS` is given up earlier.

    Returns:
        The digits and where they came from.

    Raises:
        FileNotFoundError: a file is missing from `data_dir`.
        MnistFileError: a file in `data_dir` is truncated, or is something else.
        RuntimeError: no MNIST, and scikit-learn is not installed.
    """
    if data_dir is not None:
        return _load_directory(Path(data_dir).expanduser().absolute())
    cache = _cache_dir()
    arrays, problems = _read_cache(cache)
    missing = [name for name in SHA256 if name not in arrays]
    if not missing:
        return _assemble(arrays, {}, f"MNIST from the cache {cache}")
    if not download:
        problems.append(f"{', '.join(missing)} not in the cache {cache}, and downloading is off")
        return _load_digits("; ".join(problems))
    try:
        downloaded, used = _download(missing, mirrors, deadline, cache)
    except _DownloadError as error:
        return _load_digits("; ".join([*problems, str(error)]))
    for problem in problems:
        logging.warning("Downloaded again: %s", problem)
    return _assemble(arrays | downloaded, {}, f"MNIST from {' and '.join(used)}")


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """Reads one IDX file of unsigned bytes, gzipped or not (told by its content, not its name).

    Args:
        path: the file.

    Returns:
        The array, uint8, with the shape that the file states; not writable.

    Raises:
        FileNotFoundError: there is no such file.
        MnistFileError: the file is not IDX, holds another type, or is too short or too long.
    """
    path = Path(path)
    return _parse_idx(_decompress(path.read_bytes(), path), path)


def _load_directory(directory: Path) -> Mnist:
    """Reads the four files of `directory`; what is missing or wrong there is an error."""
    paths = {name: _find(directory, name) for name in SHA256}
    present = {name: path for name, path in paths.items() if path is not None}
    if missing := [name for name in paths if name not in present]:
        raise FileNotFoundError(
            f"no {', '.join(missing)} (nor the same with .gz) in the MNIST folder {directory}"
            + ("" if directory.is_dir() else ", which is not a folder")
        )
    arrays = {name: read_idx(path) for name, path in present.items()}
    return _assemble(arrays, present, f"MNIST from {directory}")


def _find(directory: Path, name: str) -> Path | None:
    """The file of `directory` that holds `name` under one of its spellings, or None."""
    dotted = name.replace("-idx", ".idx")
    for spelling in (f"{name}.gz", name, f"{dotted}.gz", dotted):
        if (directory / spelling).is_file():
            return directory / spelling
    return None


def _cache_dir() -> Path:
    """The user's cache for MNIST; as XDG has it, a relative `XDG_CACHE_HOME` does not count."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (base if base.is_absolute() else Path.home() / ".cache") / "distrib" / "mnist"


def _read_cache(cache: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns the whole files of the cache by name, and what is wrong with the others."""
    arrays: dict[str, np.ndarray] = {}
    problems: list[str] = []
    for name in SHA256:
        path = _find(cache, name)
        if path is None:
            continue
        try:
            arrays[name] = _parse_verified(path.read_bytes(), name, path)
        except (MnistFileError, OSError) as error:
            problems.append(f"the cached file cannot be used: {error}")
    return arrays, problems


def _parse_verified(data: bytes, name: str, path: str | os.PathLike[str]) -> np.ndarray:
    """Parses `data` if its decompressed content is that of the MNIST file `name`."""
    content = _decompress(data, path, limit=_MAX_BYTES)
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256[name]:
        found = f"{digest} ({len(content):,} bytes, {_describe_start(content)})"
        raise MnistFileError(path, f"content with SHA-256 {SHA256[name]}", found)
    return _parse_idx(content, path)


def _decompress(data: bytes, path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Returns the content of gzipped `data`, or `data` itself; `limit` bounds its length."""
    if not data.startswith(_GZIP_MAGIC):
        return data
    # gzip.decompress would fill the memory before anyone could count.
    stream = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
    try:
        content = gzip.decompress(data) if limit is None else stream.decompress(data, limit + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        found = f"{len(data):,} bytes that do not decompress ({error})"
        raise MnistFileError(path, "a whole gzip file", found) from error
    if limit is not None and len(content) > limit:
        raise MnistFileError(path, f"at most {limit:,} bytes once decompressed", "more")
    if limit is not None and not stream.eof:
        found = f"{len(data):,} bytes that end in the middle of the compressed data"
        raise MnistFileError(path, "a whole gzip file", found)
    return content


def _parse_idx(content: bytes, path: str | os.PathLike[str]) -> np.ndarray:
    """Parses decompressed IDX: 0, 0, type, rank, `rank` big-endian sizes, then the items."""
    if len(content) < 4 or content[:2] != b"\0\0" or content[3] == 0:
        expected = "an IDX file (bytes 00 00 08 and the number of dimensions)"
        raise MnistFileError(path, expected, _describe_start(content))
    if content[2] != _UNSIGNED_BYTE:
        kind = _OTHER_IDX_TYPES.get(content[2], "unknown")
        found = f"type 0x{content[2]:02x} ({kind})"
        raise MnistFileError(path, "an IDX file of unsigned bytes (type 0x08)", found)
    header = 4 + 4 * content[3]
    if len(content) < header:
        expected = f"a header of {header} bytes for {content[3]} dimensions"
        raise MnistFileError(path, expected, f"{len(content)} bytes in all")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", content[3], offset=4))
    items = math.prod(shape)
    if len(content) - header != items:
        found = f"{len(content) - header:,} bytes"
        expected = f"{items:,} bytes of items for shape {list(shape)}"
        raise MnistFileError(path, expected, found)
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _describe_start(content: bytes) -> str:
    """Says in words what a file begins with."""
    if not content:
        return "an empty file"
    start = f"first bytes {content[:4].hex(' ')}"
    for known, words in _KNOWN_STARTS.items():
        if content.startswith(known):
            return f"{start}, {words}"
    text = content[:20]
    printable = text.isascii() and text.decode("ascii").replace("\n", " ").isprintable()
    return f"{start}, text {text.decode('ascii')!r}" if printable else start


def _assemble(arrays: Mapping[str, np.ndarray], paths: Mapping[str, Path], source: str) -> Mnist:
    """Checks the four arrays against each other; `paths` names their files in errors."""
    splits: list[np.ndarray] = []
    for images_name, labels_name in ((TRAIN_IMAGES, TRAIN_LABELS), (TEST_IMAGES, TEST_LABELS)):
        images, labels = arrays[images_name], arrays[labels_name]
        images_path = paths.get(images_name, images_name)
        labels_path = paths.get(labels_name, labels_name)
        if images.shape[1:] != (28, 28) or not len(images):
            found = f"shape {list(images.shape)}"
            raise MnistFileError(images_path, "images of shape [n, 28, 28], n at least 1", found)
        if labels.ndim != 1:
            raise MnistFileError(labels_path, "labels of shape [n]", f"shape {list(labels.shape)}")
        if len(labels) != len(images):
            expected = f"{len(images):,} labels, one for each image of {images_path}"
            raise MnistFileError(labels_path, expected, f"{len(labels):,}")
        if labels.max() > 9:
            first = int(np.argmax(labels > 9))
            found = f"{labels[first]} as label number {first:,}"
            raise MnistFileError(labels_path, "labels from 0 to 9", found)
        scaled = np.divide(images, np.float32(255), dtype=np.float32)
        splits += [scaled[..., np.newaxis], labels.astype(np.int32)]
    return Mnist(*splits, source=source)


def _load_digits(reason: str) -> Mnist:
    """The digits of scikit-learn, split in a fixed order; warns, with `reason`."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RuntimeError(
            f"no MNIST ({reason}), and scikit-learn, whose digits could stand in, is not "
            "installed: name a folder with the four IDX files (--data_dir) or install scikit-learn"
        ) from error
    pixels, classes = (np.asarray(part) for part in load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(classes))
    enlarged = np.kron(pixels.reshape(-1, 8, 8)[order], np.ones((1, 3, 3)))
    images = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))[..., np.newaxis] / 16
    images, labels = images.astype(np.float32), classes[order].astype(np.int32)
    source = f"the {len(labels):,} digits of scikit-learn (8x8, enlarged to 28x28), not MNIST"
    logging.warning("This uses %s, because: %s", source, reason)
    return Mnist(
        images[:_DIGITS_TRAIN],
        labels[:_DIGITS_TRAIN],
        images[_DIGITS_TRAIN:],
        labels[_DIGITS_TRAIN:],
        source,
    )


class _DownloadError(Exception):
    """Why a file did not arrive; `unreachable` when the mirror did not even answer."""

    def __init__(self, message: str, *, unreachable: bool = False):
        super().__init__(message)
        self.unreachable = unreachable


# What the thread of a download reports: the stated length, a piece, a failure, or None for the end.
_Report = int | bytes | _DownloadError | None


def _download(
    names: Sequence[str], mirrors: Sequence[str], seconds: float, cache: Path
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Fetches `names` and keeps what is right in `cache`.

    Args:
        names: the files.
        mirrors: where to ask, in order; one that does not answer is not asked again.
        seconds: for all of it.
        cache: the folder to keep the files in, if it can be written.

    Returns:
        The arrays by name, and the mirrors that they came from.

    Raises:
        _DownloadError: a file that no mirror gave; the message says what each of them did.
    """
    until = time.monotonic() + seconds
    arrays: dict[str, np.ndarray] = {}
    failures: list[str] = []
    used: list[str] = []
    silent: set[str] = set()
    with _ProgressBar() as bar:
        for name in names:
            for mirror in mirrors:
                if mirror in silent:
                    continue
                url = f"{mirror.rstrip('/')}/{name}.gz"
                logging.info("Downloading %s", url)
                try:
                    data = _fetch(url, until, bar.update)
                    arrays[name] = _parse_verified(data, name, url)
                except (_DownloadError, MnistFileError) as error:
                    failures.append(str(error))
                    if isinstance(error, _DownloadError) and error.unreachable:
                        silent.add(mirror)
                    continue
                _keep(data, cache / f"{name}.gz")
                if mirror not in used:
                    used.append(mirror)
                break
            if name not in arrays:
                raise _DownloadError("; ".join(failures) or f"no mirror to ask for {name}")
    return arrays, used


def _fetch(url: str, until: float, progress: Callable[[str, int, int | None], None]) -> bytes:
    """Returns the body of `url`, or gives up at `until` (of `time.monotonic`), whatever happens.

    A thread talks to the network, since looking up a name knows no timeout and each byte of a
    slow header starts a socket's timeout anew; all that matters (deadline, checks, files) stays
    with the caller, who can leave the thread behind.
    """
    _seconds_left(until, url)
    reports: queue.SimpleQueue[_Report] = queue.SimpleQueue()
    stop = threading.Event()
    threading.Thread(target=_transfer, args=(url, reports, stop), daemon=True).start()
    body = bytearray()
    size: int | None = None
    answered = False
    try:
        while True:
            left = _seconds_left(until, url)
            try:
                report = reports.get(timeout=min(left, ANSWER_SECONDS))
            except queue.Empty:
                if left <= ANSWER_SECONDS:
                    continue  # The time is up.
                message = f"{url}: silent for {ANSWER_SECONDS} s"
                raise _DownloadError(message, unreachable=not answered) from None
            if report is None:
                return bytes(body)
            if isinstance(report, _DownloadError):
                raise report
            answered = True
            if isinstance(report, int):
                size = report
                continue
            body += report
            if len(body) > _MAX_BYTES or (size or 0) > _MAX_BYTES:
                raise _DownloadError(f"{url}: more than {_MAX_BYTES:,} bytes, not a file of MNIST")
            progress(url.rpartition("/")[2], len(body), size)
    finally:
        stop.set()


def _seconds_left(until: float, url: str) -> float:
    """The time left until `until`; an error when there is none."""
    left = until - time.monotonic()
    if left <= 0:
        raise _DownloadError(f"{url}: the time for downloads is up")
    return left


def _transfer(url: str, reports: queue.SimpleQueue[_Report], stop: threading.Event) -> None:
    """Runs in the thread of `_fetch`; always ends with a report of None or of what went wrong."""
    answered = False
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as response:
            answered = True
            size, received = response.length, 0
            if size is not None:
                reports.put(size)
            while not stop.is_set() and (piece := response.read1(_PIECE_BYTES)):
                received += len(piece)
                reports.put(piece)
            if size is not None and received != size:
                raise OSError(f"the connection ended after {received:,} of {size:,} bytes")
        reports.put(None)
    except urllib.error.HTTPError as error:
        error.close()
        reports.put(_DownloadError(f"{url}: HTTP status {error.code} {error.reason}"))
    except Exception as error:  # Whatever it was, the caller waits for it.
        reason = getattr(error, "reason", None) or str(error) or type(error).__name__
        reports.put(_DownloadError(f"{url}: {reason}", unreachable=not answered))


def _keep(data: bytes, path: Path) -> None:
    """Writes a checked file so that others see all of it or nothing; failing to is no error."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        logging.warning("Could not keep %s in the cache: %s", path.name, error)
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


class _ProgressBar:
    """A bar for downloads that last more than a second; none where stderr is not a terminal."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TransferSpeedColumn

        console = Console(stderr=True)
        self._bars = Progress(
            "{task.description}",
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._start = time.monotonic()
        self._tasks: dict[str, TaskID] = {}

    def update(self, name: str, received: int, size: int | None) -> None:
        """Shows that `received` of `size` bytes of `name` are here."""
        if time.monotonic() - self._start < 1:
            return
        if not self._tasks:
            self._bars.start()
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name)
        self._bars.update(self._tasks[name], completed=received, total=size)

    def __enter__(self) -> "_ProgressBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._bars.stop()
