"""Token files behind a web server: how long batches are waited for, and what locality of the order saves.

What is isolated: the wait for the network. First table: a server on loopback waits so many ms before each answer; a
row is a fresh process with an empty shard cache that takes batches of a windowed order, with a pause between two of
them in place of a training step. "first" is the first batch, "waited" the mean of the others, "worst" the longest of
these; "fetched" is what the server sent.

Second table: no file is read. Over shards of equal size, what the first batches of an order need, by the window of
`permute(window=...)`: shards in a batch of 8 rows, shards among 1,000 batches (so what must be fetched and kept, where
the cache holds shards), how far a sample is moved from where it lies in the corpus on average, and from how many
thousandths of the corpus those 1,000 batches are drawn: what locality costs in shuffling.

Who does not gain: data that is in the cache is read as local files are, whatever the order; and where the network gives
fewer bytes a second than the steps take, it stays the limit.
"""

import argparse
import http.server
import json
import os
import re
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from report import machine, run_child, table

WAYS = {
    "local files": ("mmap", "1024"),
    "cached shards, as they are needed": ("mmap", "0"),
    "**cached shards, fetched ahead**": ("mmap", "1024"),
    "ranged, as they are needed": ("ranged", "0"),
    "**ranged, fetched ahead**": ("ranged", "1024"),
}
ROWS, LENGTH = 8, 2048


class Server:
    """The files of a folder, each answer after a while."""

    def __init__(self, folder: Path, latency: float) -> None:
        outer = self
        self.bodies = {f"/{path.name}": path.read_bytes() for path in folder.iterdir()}
        self.sent = self.requests = 0

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_: Any) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                time.sleep(latency)
                body, status = outer.bodies.get(self.path), 200
                if body is None:
                    self.send_response(404)
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                part = memoryview(body)
                if found := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
                    part, status = part[int(found[1]) : int(found[2]) + 1], 206
                self.send_response(status)
                if status == 206:
                    self.send_header("Content-Range", f"bytes {found[1]}-{found[2]}/{len(body)}")  # type: ignore[index]
                self.send_header("ETag", f'"{len(body)}"')
                self.send_header("Content-Length", str(len(part)))
                self.end_headers()
                if self.command == "GET":
                    outer.sent += len(part)
                    outer.requests += 1
                    self.wfile.write(part)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


def child(job: Any) -> Any:
    from tokenpipe.datapipes import TokenReader

    reader = TokenReader(job["files"], dtype="uint16", name="raw", io=job["io"])
    graph = reader.slice_sequences(LENGTH).permute(7, window=job["window"]).batch_samples(ROWS)
    next(TokenReader(job["tiny"], dtype="uint16").slice_sequences(LENGTH).batch_samples(ROWS).iterate(0))  # compiled
    waits, total = [], 0
    items = graph.iterate(0, job["batches"])
    for _ in range(job["batches"]):
        begun = time.perf_counter()
        total += int(next(items).tokens.sum())
        waits.append(time.perf_counter() - begun)
        time.sleep(job["pause"] / 1e3)
    return {"waits": waits, "total": total}


def waits(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        shards, tiny = Path(folder, "shards"), Path(folder, "tiny.bin")
        shards.mkdir()
        chance = np.random.default_rng(7)
        chance.integers(0, 50_000, 1 << 19).astype("<u2").tofile(tiny)
        for i in range(options.shards):
            chance.integers(0, 50_000, options.mib << 19).astype("<u2").tofile(shards / f"{i:02}.bin")
        server = Server(shards, options.latency / 1e3)
        window = 2 * (options.mib << 19) // LENGTH  # of two shards
        names = sorted(path.name for path in shards.iterdir())
        found, rows = set(), []
        for way, (io, ahead) in WAYS.items():
            place = str(shards) if way == "local files" else server.url
            cache = str(Path(folder, re.sub(r"\W", "", way)))
            job = {"files": [f"{place}/{name}" for name in names], "io": io, "window": window, "tiny": str(tiny)}
            server.sent = server.requests = 0
            result = run_child(
                __file__,
                {**job, "batches": options.batches, "pause": options.pause},
                way,
                {**os.environ, "TOKENPIPE_SHARDS": cache, "TOKENPIPE_FETCH_AHEAD_MIB": ahead},
            )
            found.add(result["total"])
            first, *others = (seconds * 1e3 for seconds in result["waits"])
            waited = f"{np.mean(others):.2f} ms", f"{max(others):.0f} ms"
            rows.append((way, f"{first:.0f} ms", *waited, f"{server.sent / 2**20:.0f} MiB", f"{server.requests}"))
        if len(found) > 1:
            raise SystemExit("the ways gave different batches")
        print(
            f"\n{options.shards} shards of {options.mib} MiB, {options.latency:g} ms before each answer, "
            f"{options.batches} batches of {ROWS} × {LENGTH}, {options.pause:g} ms between two, window: two shards\n"
        )
        print(table(["", "first", "waited", "worst", "fetched", "requests"], rows))


def locality(shards: int, windows_of_shard: int) -> None:
    from tokenpipe.datapipes import TokenReader
    from tokenpipe.datapipes.fetch.routes import plan_of

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{i:04}.bin") for i in range(shards)]
        for path in paths:
            with path.open("wb") as file:
                file.truncate(2 * LENGTH * windows_of_shard)  # sparse: nothing of it is read but its first bytes
        reader = TokenReader([str(path) for path in paths], dtype="uint16", name="raw")
        sliced, rows = reader.slice_sequences(LENGTH), []
        size = LENGTH * windows_of_shard
        for name, window in (
            ("a quarter of a shard", windows_of_shard // 4),
            ("one shard", windows_of_shard),
            ("4 shards", 4 * windows_of_shard),
            ("16 shards", 16 * windows_of_shard),
            ("all", None),
        ):
            order = sliced.permute(7, window=window)
            numbers = np.arange(min(1000 * ROWS, len(order)), dtype=np.int64)
            places = plan_of(order).starts(numbers)[1]
            shard = places // size
            some = [len(set(shard[i : i + ROWS].tolist())) for i in range(0, numbers.size - ROWS, ROWS)]
            moved = float(np.mean(np.abs(places // LENGTH - numbers))) / len(sliced)
            spread = len(np.unique(places * 1000 // (size * shards)))
            rows.append((name, f"{np.mean(some):.1f}", f"{len(np.unique(shard))}", f"{moved:.2%}", f"{spread} of 1000"))
        print(f"\n{shards} shards of {windows_of_shard:,} windows, the first 1,000 batches of {ROWS} rows\n")
        print(table(["window", "shards a batch", "shards in all", "moved by (of the corpus)", "drawn from"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Batches of token files behind a web server, and orders with locality."
    )
    parser.add_argument("--shards", type=int, default=12, help="shards on the server (default: %(default)s)")
    parser.add_argument("--mib", type=int, default=8, help="MiB of each (default: %(default)s)")
    parser.add_argument("--latency", type=float, default=20.0, help="ms before each answer (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=5.0, help="ms between two batches (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=1200, help="batches of each row (default: %(default)s)")
    parser.add_argument("--quick", "--short", action="store_true", help="a smoke test, no figures")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.load(sys.stdin))))
        return
    if options.quick:
        options.shards, options.mib, options.batches, options.latency, options.pause = 3, 1, 30, 2.0, 0.0
    print("## Token files behind a web server\n")
    print(machine("torch", "numpy", "numba"))
    waits(options)
    locality(*((16, 64) if options.quick else (64, 16_384)))


if __name__ == "__main__":
    main()
