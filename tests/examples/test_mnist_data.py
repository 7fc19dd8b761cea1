"""`examples/mnist/mnist_data.py`: files of every kind, the cache, and mirrors that misbehave.

The mirrors are real HTTP servers on the loopback interface. The real MNIST is used where the
checkout has it beside it, and a small set of the same form where not.
"""

import gzip
import hashlib
import http.server
import importlib
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "mnist"
REAL = ROOT.parent / "shared" / "data" / "mnist"
sys.path.insert(0, str(EXAMPLE))
mnist_data = importlib.import_module("mnist_data")

NAMES = tuple(mnist_data.SHA256)
TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES

Reply = Callable[[http.server.BaseHTTPRequestHandler, bytes], None]


def idx_bytes(array: np.ndarray, kind: int = 0x08) -> bytes:
    """The IDX file of `array`."""
    header = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def synthetic_files(train: int = 60, test: int = 20) -> dict[str, bytes]:
    """Four decompressed IDX files with random digits, by name."""
    rng = np.random.default_rng(7)
    files: dict[str, bytes] = {}
    for images_name, labels_name, count in (
        (TRAIN_IMAGES, TRAIN_LABELS, train),
        (TEST_IMAGES, TEST_LABELS, test),
    ):
        files[images_name] = idx_bytes(rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        files[labels_name] = idx_bytes(rng.integers(0, 10, count, dtype=np.uint8))
    return files


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    """Writes `files`, gzipped, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
    return folder


def trust(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> None:
    """Makes `files` the ones whose digests the loader expects."""
    for name, content in files.items():
        monkeypatch.setitem(mnist_data.SHA256, name, hashlib.sha256(content).hexdigest())


class Mirror:
    """An HTTP server with the four files; `replies` changes how it answers for one of them."""

    def __init__(self, bodies: dict[str, bytes]):
        """Serves `bodies` (gzipped, by name without .gz) from an ephemeral port."""
        self.replies: dict[str, Reply] = {}
        self.requests: list[str] = []
        self.half_sent = threading.Event()
        self.released = threading.Event()
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2].removesuffix(".gz")
                mirror.requests.append(name)
                try:
                    mirror.replies.get(name, send_whole)(self, bodies[name])
                except OSError:
                    pass  # The client left.

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/mnist/"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def stall_midway(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        """Sends half, then nothing until `close`."""
        send_head(handler, len(body))
        handler.wfile.write(body[: len(body) // 2])
        self.half_sent.set()
        self.released.wait(30)

    def stall_at_once(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        """Accepts the request and never answers."""
        self.released.wait(30)

    def trickle(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        """Sends a byte every 20 ms: never silent, never done."""
        send_head(handler, len(body))
        for byte in body:
            handler.wfile.write(bytes([byte]))
            if self.released.wait(0.02):
                return

    def trickle_head(self, handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        """Sends the header itself a byte at a time."""
        for byte in b"HTTP/1.0 200 OK\r\nX-Long: " + b"x" * 10_000:
            handler.wfile.write(bytes([byte]))
            if self.released.wait(0.02):
                return

    def close(self) -> None:
        """Ends the server and whoever waits in it."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def send_head(handler: http.server.BaseHTTPRequestHandler, length: int | None) -> None:
    """Sends a header that promises `length` bytes."""
    handler.send_response(200)
    if length is not None:
        handler.send_header("Content-Length", str(length))
    handler.end_headers()


def send_whole(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Answers as a healthy server."""
    send_head(handler, len(body))
    handler.wfile.write(body)


def end_early(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Promises all, sends half, and closes in good order."""
    send_head(handler, len(body))
    handler.wfile.write(body[: len(body) // 2])


def promise_half(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Sends a consistent answer that is only half of the file."""
    send_whole(handler, body[: len(body) // 2])


def end_early_without_length(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Sends half without having said how much it would be."""
    send_head(handler, None)
    handler.wfile.write(body[: len(body) // 2])


def die_midway(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Sends half and resets the connection."""
    send_head(handler, len(body))
    handler.wfile.write(body[: len(body) // 2])
    handler.wfile.flush()
    time.sleep(0.05)
    handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    handler.connection.close()


def send_other_content(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Sends a well-formed IDX file in which one pixel differs."""
    content = bytearray(gzip.decompress(body))
    content[-1] ^= 1
    send_whole(handler, gzip.compress(bytes(content)))


def send_login_page(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Answers as the captive portal of a hotel."""
    send_whole(handler, b"<html>Please log in.</html>")


def send_not_found(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Answers 404."""
    handler.send_error(404)


def send_bomb(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Sends a small file that decompresses to more than MNIST could be."""
    send_whole(handler, gzip.compress(bytes(mnist_data._MAX_BYTES + 10), 1))


def promise_too_much(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Promises a terabyte."""
    send_head(handler, 1 << 40)
    handler.wfile.write(body)


def never_end(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Sends without a pause, as fast as one can take it, more than anyone wants."""
    send_head(handler, None)
    while True:
        handler.wfile.write(bytes(1 << 14))


def speak_no_http(handler: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
    """Answers with something that is not HTTP."""
    handler.wfile.write(b"220 mail.example.org ESMTP\r\n")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every test has its own empty cache, and no proxy stands before the loopback interface."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "xdg" / "distrib" / "mnist"


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A small trusted data set: decompressed files by name."""
    files = synthetic_files()
    trust(monkeypatch, files)
    return files


@pytest.fixture
def make_mirror(files: dict[str, bytes]) -> Iterator[Callable[[], Mirror]]:
    """Starts mirrors of `files`, and ends them."""
    mirrors: list[Mirror] = []
    bodies = {name: gzip.compress(content, 1) for name, content in files.items()}

    def make() -> Mirror:
        mirrors.append(Mirror(bodies))
        return mirrors[-1]

    yield make
    for mirror in mirrors:
        mirror.close()


@pytest.fixture
def mirror(make_mirror: Callable[[], Mirror]) -> Mirror:
    """One mirror of `files`."""
    return make_mirror()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings logged so far."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def assert_holds(mnist: object, files: dict[str, bytes]) -> None:
    """`mnist` has exactly the digits of `files`."""
    for split, images_name, labels_name in (
        ("train", TRAIN_IMAGES, TRAIN_LABELS),
        ("test", TEST_IMAGES, TEST_LABELS),
    ):
        images, labels = getattr(mnist, f"{split}_images"), getattr(mnist, f"{split}_labels")
        pixels = np.frombuffer(files[images_name], np.uint8, offset=16).reshape(-1, 28, 28, 1)
        assert images.dtype == np.float32 and labels.dtype == np.int32
        assert images.min() >= 0 and images.max() <= 1
        np.testing.assert_array_equal(images, pixels.astype(np.float32) / np.float32(255))
        np.testing.assert_array_equal(labels, np.frombuffer(files[labels_name], np.uint8, offset=8))


def assert_digits(mnist: object) -> None:
    """`mnist` is the stand-in from scikit-learn."""
    assert mnist.train_images.shape == (1500, 28, 28, 1)
    assert mnist.test_images.shape == (297, 28, 28, 1)
    assert "scikit-learn" in mnist.source


# Folders.


def test_real_mnist_or_a_set_of_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The real files load, their content has the digests in the module, and a cache of them works.

    Where the real files are not there, synthetic ones of the full size take their place.
    """
    folder = REAL
    if not REAL.is_dir():
        synthetic = synthetic_files(60_000, 10_000)
        trust(monkeypatch, synthetic)
        folder = write_folder(tmp_path / "synthetic", synthetic)
    mnist = mnist_data.load(folder)
    assert mnist.train_images.shape == (60_000, 28, 28, 1)
    assert mnist.test_images.shape == (10_000, 28, 28, 1)
    assert mnist.train_images.dtype == np.float32 and mnist.train_labels.dtype == np.int32
    assert (mnist.train_images.min(), mnist.train_images.max()) == (0, 1)
    assert set(mnist.test_labels.tolist()) == set(range(10))
    assert str(folder) in mnist.source

    (tmp_path / "xdg2" / "distrib").mkdir(parents=True)
    (tmp_path / "xdg2" / "distrib" / "mnist").symlink_to(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg2"))
    cached = mnist_data.load(mirrors=())
    assert "cache" in cached.source
    np.testing.assert_array_equal(cached.train_labels, mnist.train_labels)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dotted", [True, False])
def test_spellings(tmp_path: Path, zipped: bool, dotted: bool):
    """A folder may hold the files gzipped or not, with a dash or a dot; digests don't matter."""
    files = synthetic_files()
    for name, content in files.items():
        name = name.replace("-idx", ".idx") if dotted else name
        path = tmp_path / (f"{name}.gz" if zipped else name)
        path.write_bytes(gzip.compress(content) if zipped else content)
    assert_holds(mnist_data.load(str(tmp_path)), files)


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`~` means the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_folder(tmp_path / "digits", synthetic_files())
    assert str(tmp_path / "digits") in mnist_data.load("~/digits").source


def test_missing_files_are_named(tmp_path: Path, files: dict[str, bytes], mirror: Mirror):
    """A folder that lacks a file is an error, though the cache and a mirror have it."""
    mnist_data.load(mirrors=[mirror.url])
    folder = write_folder(tmp_path / "folder", files)
    (folder / f"{TEST_LABELS}.gz").unlink()
    (folder / f"{TRAIN_IMAGES}.gz").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        mnist_data.load(folder, mirrors=[mirror.url])
    message = str(caught.value)
    assert str(folder) in message and TEST_LABELS in message and TRAIN_IMAGES in message
    assert TRAIN_LABELS not in message and "not a folder" not in message


@pytest.mark.parametrize("name", ["nowhere", "a_file", ""])
def test_no_such_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    """Neither a wrong path nor an empty one falls back to anything."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_file").write_text("x")
    with pytest.raises(FileNotFoundError, match="train-images") as caught:
        mnist_data.load(name)
    assert str(tmp_path / name) in str(caught.value)


# One file.

GOOD = idx_bytes(np.arange(24, dtype=np.uint8).reshape(4, 3, 2))
FOREIGN = {
    "empty": (b"", "IDX file", "an empty file"),
    "png": (b"\x89PNG\r\n\x1a\n" + bytes(50), "IDX file", "a PNG image"),
    "text": (b"5,0,4,1,9\n2,1,3", "IDX file", "'5,0,4,1,9"),
    "html": (b"<html><body>404</body></html>", "IDX file", "HTML"),
    "zip": (b"PK\x03\x04" + bytes(50), "IDX file", "a zip archive"),
    "zeros": (bytes(64), "IDX file", "first bytes 00 00 00 00"),
    "short magic": (GOOD[:3], "IDX file", "first bytes 00 00 08"),
    "other type": (b"\0\0\x0d" + GOOD[3:], "unsigned bytes", "float32"),
    "unknown type": (b"\0\0\x77" + GOOD[3:], "type 0x77|unsigned bytes", "unknown"),
    "little endian": (GOOD[3::-1] + GOOD[4:], "IDX file", "03 08 00 00"),
    "header cut": (GOOD[:9], "a header of 16 bytes", "9 bytes"),
    "truncated": (GOOD[:-1], r"24 bytes of items for shape \[4, 3, 2\]", "23 bytes"),
    "overlong": (GOOD + b"\0", r"24 bytes of items for shape \[4, 3, 2\]", "25 bytes"),
    "huge sizes": (GOOD[:4] + b"\xff" * 12 + GOOD[16:], "4,294,967,295|bytes of items", "24 bytes"),
    "gzip cut": (gzip.compress(GOOD)[:-12], "a whole gzip file", "do not decompress"),
    "gzip header cut": (gzip.compress(GOOD)[:5], "a whole gzip file", "do not decompress"),
    "gzip damaged": (gzip.compress(GOOD)[:-6] + b"abcdef", "a whole gzip file", "CRC"),
    "gzip and more": (gzip.compress(GOOD) + b"more", "a whole gzip file", "do not decompress"),
    "gzip of text": (gzip.compress(b"hello, world"), "IDX file", "'hello, world'"),
    "gzip twice": (gzip.compress(gzip.compress(GOOD)), "IDX file", "gzip inside gzip"),
}


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_foreign_file(tmp_path: Path, case: str, suffix: str):
    """The error names the file, what was expected and what was found."""
    content, expected, found = FOREIGN[case]
    path = tmp_path / f"digits-ubyte{suffix}"
    path.write_bytes(content)
    with pytest.raises(mnist_data.MnistFileError, match=f"expected .*({expected})") as caught:
        mnist_data.read_idx(path)
    assert str(path) in str(caught.value)
    assert found in str(caught.value).partition(", found ")[2]
    assert isinstance(caught.value, ValueError) and caught.value.path == str(path)


@pytest.mark.parametrize("content", [GOOD, gzip.compress(GOOD)])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_read_idx(tmp_path: Path, content: bytes, suffix: str):
    """The content decides whether a file is gzipped, not its name."""
    path = tmp_path / f"digits-ubyte{suffix}"
    path.write_bytes(content)
    array = mnist_data.read_idx(str(path))
    assert array.dtype == np.uint8
    np.testing.assert_array_equal(array, np.arange(24).reshape(4, 3, 2))


def test_every_truncation_is_refused(tmp_path: Path):
    """No prefix of a file, gzipped or not, passes as the file."""
    path = tmp_path / "digits"
    for content in (GOOD, gzip.compress(GOOD)):
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(mnist_data.MnistFileError, match="expected .*found"):
                mnist_data.read_idx(path)


DISAGREEING = {
    "labels for images": (TRAIN_IMAGES, np.zeros(60, np.uint8), r"\[n, 28, 28\].*\[60\]"),
    "images for labels": (TEST_LABELS, np.zeros((20, 28, 28), np.uint8), r"\[n\].*\[20, 28, 28\]"),
    "wrong size": (TEST_IMAGES, np.zeros((20, 32, 32), np.uint8), r"28, 28.*\[20, 32, 32\]"),
    "no images": (TEST_IMAGES, np.zeros((0, 28, 28), np.uint8), r"at least 1.*\[0, 28, 28\]"),
    "colours": (TEST_IMAGES, np.zeros((20, 28, 28, 3), np.uint8), r"28\].*\[20, 28, 28, 3\]"),
    "one label less": (TRAIN_LABELS, np.zeros(59, np.uint8), "60 labels.*found 59"),
    "ten": (TRAIN_LABELS, np.repeat(np.uint8([3, 10]), 30), "0 to 9.*10 as label number 30"),
}


@pytest.mark.parametrize("case", DISAGREEING)
def test_files_that_disagree(tmp_path: Path, case: str):
    """Well-formed files that are not images and labels of the same digits are refused."""
    name, array, pattern = DISAGREEING[case]
    folder = write_folder(tmp_path, synthetic_files() | {name: idx_bytes(array)})
    with pytest.raises(mnist_data.MnistFileError, match=pattern) as caught:
        mnist_data.load(folder)
    assert caught.value.path == str(folder / f"{name}.gz")


# Mirrors and the cache.


def test_download_then_cache(files: dict[str, bytes], mirror: Mirror, cache: Path, caplog):
    """The first load asks the mirror once for each file, the second asks nobody."""
    mnist = mnist_data.load(mirrors=[mirror.url])
    assert_holds(mnist, files)
    assert mirror.url in mnist.source
    assert sorted(mirror.requests) == sorted(NAMES)
    assert sorted(os.listdir(cache)) == sorted(f"{name}.gz" for name in NAMES)

    again = mnist_data.load(mirrors=[mirror.url])
    assert_holds(again, files)
    assert str(cache) in again.source
    assert len(mirror.requests) == 4
    assert warnings_of(caplog) == []


def test_slash_at_the_end_of_a_mirror_is_optional(files: dict[str, bytes], mirror: Mirror):
    """Both spellings of a folder's address work."""
    assert_holds(mnist_data.load(mirrors=[mirror.url.rstrip("/")]), files)


def test_cache_without_xdg(tmp_path: Path, monkeypatch, files: dict[str, bytes], mirror: Mirror):
    """Without an absolute XDG_CACHE_HOME the cache is in the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    mnist_data.load(mirrors=[mirror.url])
    assert len(os.listdir(tmp_path / ".cache" / "distrib" / "mnist")) == 4
    assert not (tmp_path / "relative").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert "cache" in mnist_data.load(mirrors=()).source


BAD_REPLIES = {
    end_early: r"ended after [\d,]+ of [\d,]+ bytes",
    promise_half: "a whole gzip file",
    end_early_without_length: "a whole gzip file",
    die_midway: "reset",
    send_other_content: "SHA-256",
    send_login_page: "HTML",
    send_not_found: "404",
    send_bomb: "at most 67,108,864 bytes",
    never_end: "more than 67,108,864 bytes",
    promise_too_much: "more than 67,108,864 bytes",
    speak_no_http: "220 mail",
}


@pytest.mark.parametrize("reply", BAD_REPLIES, ids=lambda reply: reply.__name__)
def test_bad_reply(reply: Reply, make_mirror, files, cache: Path, caplog):
    """A wrong body is never kept: the next mirror is asked, or the digits take over and say why."""
    bad, good = make_mirror(), make_mirror()
    bad.replies[TRAIN_IMAGES] = reply
    assert_digits(mnist_data.load(mirrors=[bad.url]))
    (warning,) = warnings_of(caplog)
    assert "scikit-learn" in warning and f"{bad.url}{TRAIN_IMAGES}.gz" in warning
    assert re.search(BAD_REPLIES[reply], warning)
    caplog.clear()
    assert not (cache / f"{TRAIN_IMAGES}.gz").exists()

    assert_holds(mnist_data.load(mirrors=[bad.url, good.url]), files)
    assert TRAIN_IMAGES in good.requests
    assert warnings_of(caplog) == []
    assert sorted(os.listdir(cache)) == sorted(f"{name}.gz" for name in NAMES)


@pytest.mark.parametrize("behaviour", ["stall_midway", "stall_at_once", "trickle", "trickle_head"])
def test_deadline(behaviour: str, mirror: Mirror, cache: Path, caplog):
    """A server that takes for ever, in whichever way, is left at the deadline."""
    mirror.replies[TRAIN_LABELS] = getattr(mirror, behaviour)
    start = time.monotonic()
    assert_digits(mnist_data.load(mirrors=[mirror.url], deadline=1))
    assert 0.9 < time.monotonic() - start < 5
    (warning,) = warnings_of(caplog)
    assert "the time for downloads is up" in warning
    # What was whole before it is kept, and the rest is fetched next time.
    assert os.listdir(cache) == [f"{TRAIN_IMAGES}.gz"]
    del mirror.replies[TRAIN_LABELS]
    mnist_data.load(mirrors=[mirror.url])
    assert mirror.requests.count(TRAIN_IMAGES) == 1


def test_silent_mirror_is_asked_once(make_mirror, files, monkeypatch):
    """A mirror that doesn't answer costs one wait, not one for each file."""
    monkeypatch.setattr(mnist_data, "ANSWER_SECONDS", 0.8)
    silent, good = make_mirror(), make_mirror()
    for name in NAMES:
        silent.replies[name] = silent.stall_at_once
    assert_holds(mnist_data.load(mirrors=[silent.url, good.url]), files)
    assert len(silent.requests) == 1 and len(good.requests) == 4


def test_offline_is_quick(caplog):
    """Refused connections and unknown names: the digits within seconds, and one line."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mirrors = (f"http://127.0.0.1:{port}/", "http://mnist.invalid/", "gibberish")
    start = time.monotonic()
    assert_digits(mnist_data.load(mirrors=mirrors))
    assert time.monotonic() - start < 10
    (warning,) = warnings_of(caplog)
    assert "\n" not in warning
    assert "refused" in warning and "mnist.invalid" in warning and "gibberish" in warning


def test_killed_download_leaves_nothing(mirror: Mirror, files, cache: Path):
    """A process killed in the middle of a file: the cache has no such file, the next load is whole.

    The real digests would refuse the small file, so the child takes them from its arguments.
    """
    mirror.replies[TRAIN_IMAGES] = mirror.stall_midway
    code = (
        "import sys, mnist_data\n"
        "mnist_data.SHA256.update(zip(mnist_data.SHA256, sys.argv[2:]))\n"
        "mnist_data.load(mirrors=[sys.argv[1]])\n"
    )
    digests = [mnist_data.SHA256[name] for name in NAMES]
    child = subprocess.Popen([sys.executable, "-c", code, mirror.url, *digests], cwd=EXAMPLE)
    try:
        assert mirror.half_sent.wait(10)
    finally:
        child.kill()
        assert child.wait() == -signal.SIGKILL
    assert not cache.exists() or os.listdir(cache) == []
    del mirror.replies[TRAIN_IMAGES]
    assert_holds(mnist_data.load(mirrors=[mirror.url]), files)


def test_two_processes_at_once(mirror: Mirror, files, cache: Path):
    """Loads that race for one cache all get whole files."""
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(mnist_data.load(mirrors=[mirror.url])))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for mnist in results:
        assert_holds(mnist, files)
    assert sorted(os.listdir(cache)) == sorted(f"{name}.gz" for name in NAMES)


@pytest.mark.parametrize("damage", [lambda b: b[:-20], lambda b: b"", lambda b: b"\x89PNG" + b])
def test_corrupt_cache_is_downloaded_again(damage, mirror: Mirror, files, cache: Path, caplog):
    """Only the bad file is fetched; without network the digits take over and the line says why."""
    mnist_data.load(mirrors=[mirror.url])
    path = cache / f"{TEST_IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))

    assert_digits(mnist_data.load(mirrors=[mirror.url], download=False))
    (warning,) = warnings_of(caplog)
    assert str(path) in warning and "expected" in warning and "downloading is off" in warning
    caplog.clear()
    assert_digits(mnist_data.load(mirrors=()))
    (warning,) = warnings_of(caplog)
    assert str(path) in warning and "no mirror" in warning
    caplog.clear()
    assert len(mirror.requests) == 4

    assert_holds(mnist_data.load(mirrors=[mirror.url]), files)
    assert mirror.requests[4:] == [TEST_IMAGES]
    (warning,) = warnings_of(caplog)
    assert "Downloaded again" in warning and str(path) in warning
    assert "cache" in mnist_data.load(mirrors=()).source


def test_other_content_in_the_cache(files, mirror: Mirror, cache: Path):
    """A well-formed file that is not MNIST doesn't pass as MNIST, under any spelling."""
    other = {name: content[:-1] + b"\x01" for name, content in synthetic_files(60, 20).items()}
    cache.mkdir(parents=True)
    for name, content in other.items():
        (cache / name).write_bytes(content)
    assert_holds(mnist_data.load(mirrors=[mirror.url]), files)
    assert_holds(mnist_data.load(mirrors=()), files)


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch, mirror: Mirror, files, caplog):
    """The data is used all the same, and a line says that it was not kept."""
    (tmp_path / "a_file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
    assert_holds(mnist_data.load(mirrors=[mirror.url]), files)
    assert any("Could not keep" in line for line in warnings_of(caplog))


def test_failed_rename_leaves_no_temporary_file(monkeypatch, mirror: Mirror, files, cache: Path):
    """What could not be renamed is removed."""

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mnist_data.os, "replace", full)
    assert_holds(mnist_data.load(mirrors=[mirror.url]), files)
    assert os.listdir(cache) == []


# The digits of scikit-learn.


def test_digits(caplog):
    """They are real, in range, of ten classes, and the same each time; no mirror is asked."""
    first, second = mnist_data.load(download=False), mnist_data.load(download=False)
    assert_digits(first)
    assert first.train_images.dtype == np.float32 and first.train_labels.dtype == np.int32
    assert first.train_labels.shape == (1500,) and first.test_labels.shape == (297,)
    assert (first.train_images.min(), first.train_images.max()) == (0, 1)
    assert set(first.train_labels.tolist()) == set(first.test_labels.tolist()) == set(range(10))
    for name in ("train_images", "train_labels", "test_images", "test_labels"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert len(warnings_of(caplog)) == 2

    # Nearest class mean already tells them apart: pixels and labels belong together.
    means = np.stack([first.train_images[first.train_labels == d].mean(0) for d in range(10)])
    distances = ((first.test_images[:, None] - means) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == first.test_labels).mean() > 0.85


def test_without_scikit_learn(monkeypatch):
    """Neither MNIST nor a stand-in: the error says what to do."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(RuntimeError, match="downloading is off.*--data_dir.*scikit-learn"):
        mnist_data.load(download=False)


def test_needs_neither_jax_nor_scikit_learn_for_files():
    """Reading files imports nothing heavy."""
    heavy = ("jax", "sklearn", "distrib", "rich")
    code = f"import sys, mnist_data; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLE, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
