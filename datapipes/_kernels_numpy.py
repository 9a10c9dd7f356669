"""The kernels of `_kernels_numba.py` in NumPy and plain Python: the same bits, more slowly.

They are the oracle of the tests, and what runs where numba cannot compile. `gather` here takes files as arrays[e], of
which the pieces [bounds[e], bounds[e + 1]) begin at item place[p], instead of the pieces' addresses (or what reads an
open file when it is sliced, so that it is `gather_files` too), and `row_documents` its tables, and the document ends
of the entries, as arrays.
"""

import heapq
import itertools
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

__all__ = [
    "aligned_starts",
    "blend_route",
    "blend_unroute",
    "blocks_good",
    "cut_documents",
    "deal_evenly",
    "gather",
    "gather_files",
    "mask_labels",
    "nanoset_counts",
    "pack_best_fit",
    "packed_spans",
    "permute",
    "row_documents",
]

Int64s = npt.NDArray[np.int64]
Int32s = npt.NDArray[np.int32]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_NARROW = 1 << 32


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _feistel(index: Int64s, size: int, key: np.ndarray, inverse: bool) -> Int64s:
    """One size, one key an element."""
    if size <= 1:
        return index
    bits = max(6, (size - 1).bit_length())
    low, high = np.uint64(bits // 2), np.uint64(bits - bits // 2)
    mask = np.uint64((1 << int(low)) - 1)
    low_shift, high_shift = np.uint64(64) - low, np.uint64(64) - high
    x = index.astype(np.uint64)
    todo = np.arange(x.size)
    while todo.size:
        left, right, k = x[todo] >> low, x[todo] & mask, key[todo]
        rounds = range(8, 0, -1) if inverse else range(1, 9)
        for r in rounds:
            step = k + _GOLDEN * np.uint64(r)
            if r % 2:
                left ^= _mix(right + step) >> high_shift
            else:
                right ^= _mix(left + step) >> low_shift
        x[todo] = (left << low) | right
        todo = todo[x[todo] >= np.uint64(size)]
    return x.astype(np.int64)


def permute(
    numbers: Int64s,
    out: Int64s,
    length: int,
    block: int,
    end: int,
    key: int,
    by_block: bool,
    inverse: bool,
) -> None:
    with np.errstate(over="ignore"):
        epoch = numbers // length
        b = (numbers - epoch * length) // block
        first = epoch * length + b * block
        size = np.minimum(np.minimum(block, length - b * block), end - first)
        k = _mix(np.uint64(key) + _GOLDEN * (epoch + 1).astype(np.uint64))
        if by_block:
            k = _mix(k + _GOLDEN * (b + 1).astype(np.uint64))
        for n in np.unique(size):
            at = np.flatnonzero(size == n)
            out[at] = first[at] + _feistel(numbers[at] - first[at], int(n), k[at], inverse)


def _muldiv(x: Int64s, a: int, phi: int, n: int) -> tuple[Int64s, Int64s]:
    if n <= _NARROW:
        t = x.astype(np.uint64) * np.uint64(a) + np.uint64(phi)
        q = t // np.uint64(n)
        return q.astype(np.int64), (t - q * np.uint64(n)).astype(np.int64)
    pairs = [divmod(int(v) * a + phi, n) for v in x]  # beyond 64 bits: Python's integers
    result = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return result[:, 0], result[:, 1]


def blend_route(
    numbers: Int64s,
    out_source: Int64s,
    out_number: Int64s,
    first: Int64s,
    root: Int64s,
    offset: Int64s,
    left: Int64s,
    right: Int64s,
    weight: Int64s,
    total: Int64s,
) -> None:
    phase = np.searchsorted(first, numbers, side="right") - 1
    todo = []
    for p in np.unique(phase):
        at = np.flatnonzero(phase == p)
        todo.append((int(p), int(root[p]), at, numbers[at] - first[p]))
    while todo:
        p, v, at, k = todo.pop()
        if v < 0:
            out_source[at] = -v - 1
            out_number[at] = offset[p, -v - 1] + k
            continue
        n, a = int(total[v]), int(weight[v])
        q = k // n
        x, r = _muldiv(k - q * n, a, n // 2, n)
        lefts = q * a + x
        goes_left = r + a >= n
        for side, mask, number in ((left, goes_left, lefts), (right, ~goes_left, k - lefts)):
            if mask.any():
                todo.append((p, int(side[v]), at[mask], number[mask]))


def blend_unroute(
    source: int,
    numbers: Int64s,
    out: Int64s,
    first: Int64s,
    offset: Int64s,
    leaf: Int64s,
    parent: Int64s,
    left: Int64s,
    weight: Int64s,
    total: Int64s,
    end: int,
) -> None:
    for i, number in enumerate(numbers.tolist()):
        p = first.size - 1
        while p > 0 and offset[p, source] > number:
            p -= 1
        v = int(leaf[p, source])
        out[i] = -1
        if v == -1:
            continue
        k, child = number - int(offset[p, source]), -source - 1
        while v >= 0:
            n = int(total[v])
            if left[v] == child:
                w, phi = int(weight[v]), n // 2
            else:
                w, phi = n - int(weight[v]), n - 1 - n // 2
            q, rest = divmod(k, w)
            k = q * n + -((phi - (rest + 1) * n) // w) - 1
            child, v = v, int(parent[v])
        if int(first[p]) + k < end:
            out[i] = int(first[p]) + k


def gather(
    starts: Int64s,
    counts: Int64s,
    out: Int64s,
    first: Int64s,
    bounds: Int64s,
    place: Int64s,
    arrays: "list[np.ndarray | None]",
) -> int:
    at = 0
    for start, width in zip(starts.tolist(), np.broadcast_to(counts, starts.shape).tolist(), strict=True):
        if start < 0:
            out[at : at + width] = 0
            at += width
            continue
        p, stop = int(np.searchsorted(first, start, side="right")) - 1, at + width
        while at < stop:
            tokens = arrays[int(np.searchsorted(bounds, p, side="right")) - 1]
            if tokens is None:
                return p
            skip = max(0, start - int(first[p]))
            count = min(stop - at, int(first[p + 1] - first[p]) - skip)
            begin = int(place[p]) + skip
            out[at : at + count] = tokens[begin : begin + count]
            at += count
            p += 1
    return -1


gather_files = gather


def blocks_good(
    starts: Int64s,
    counts: Int64s,
    first: Int64s,
    itemcode: Int64s,
    byte: Int64s,
    table: Int64s,
    good: np.ndarray,
) -> bool:
    for start, left in zip(starts.tolist(), np.broadcast_to(counts, starts.shape).tolist(), strict=True):
        if start < 0:
            continue
        p = int(np.searchsorted(first, start, side="right")) - 1
        while left > 0:
            skip = start - int(first[p])
            count = min(left, int(first[p + 1]) - start)
            if table[p] >= 0 and count > 0:
                size = abs(int(itemcode[p]))
                low, base = int(byte[p]) + skip * size, int(table[p])
                if not good[base + (low >> 16) : base + ((low + count * size - 1) >> 16) + 1].all():
                    return False
            start, left, p = start + count, left - count, p + 1
    return True


def row_documents(
    place: Int64s,
    count: Int64s,
    width: int,
    inputs: int,
    first: Int64s,
    begin: Int64s,
    entries: Int64s,
    positions: Int64s,
    numbers: Int64s,
    joins: np.ndarray,
    sequences: np.ndarray,
    costs: Int64s,
    arrays: "list[np.ndarray | None]",
) -> tuple[int, int]:
    stretches: list[tuple[int, int, int]] = []  # row, first token, one past the last
    row = at = 0
    for k, p in enumerate(place.tolist()):
        left = int(count[0] if count.size == 1 else count[k])
        f = int(np.searchsorted(first, p, side="right")) - 1
        while left > 0:
            take, cuts = left, np.empty(0, np.int64)
            if p >= 0:
                take = min(left, int(first[f + 1]) - p)
                entry = int(np.searchsorted(entries[:, 0], f, side="right")) - 1
                if entries[entry, 2]:
                    if (ends := arrays[entry]) is None:
                        return -1 - entry, 0
                    x = int(begin[f]) + p - int(first[f])
                    low, high = np.searchsorted(ends, np.array([x, x + take], np.uint64), side="right")
                    cuts = np.unique(ends[low:high].astype(np.int64)) - x
            cuts = cuts[(cuts > 0) & (cuts < take)]  # ends that are damaged may stand in any order
            edges = [0, *cuts.tolist(), take] if take else []
            stretches += [(row, at + a, at + b) for a, b in itertools.pairwise(edges)]
            at, left, p, f = at + take, left - take, p + take, f + 1
        if at == width:
            row, at = row + 1, 0
    found = longest = number = 0
    last = -1
    for row_of, a, b in stretches:
        if joins.size and a:
            joins[row_of, a - 1] = True
        if (size := min(b, inputs) - a) > 0:
            number, last = (number + 1 if row_of == last else 0), row_of
            if positions.size:
                positions[row_of, a : a + size] = np.arange(size)
            if numbers.size:
                numbers[row_of, a : a + size] = number
            if found < sequences.size:
                sequences[found] = row_of * inputs + a
            if costs.size:
                costs[row_of] += size * size
            found, longest = found + 1, max(longest, size)
    if found < sequences.size:
        sequences[found] = row * inputs
    return found, longest


def cut_documents(
    sequences: np.ndarray, length: int, size: int, rank: int, row: Int64s, begin: Int64s, count: Int64s
) -> int:
    parts, n = (rank, 2 * size - 1 - rank), 0
    documents = list(itertools.pairwise(sequences.tolist()))
    for r, own in itertools.groupby(documents, lambda document: document[0] // length):
        lengths = [(first - r * length, stop - first) for first, stop in own]
        share = sum(tokens % (2 * size) for _, tokens in lengths) // (2 * size)
        before = 0
        for first, tokens in lengths:
            chunk, rest = divmod(tokens, 2 * size)
            held = [(first + part * chunk, chunk) for part in parts]
            for part in parts:
                low = max(before, part * share)
                held.append((first + tokens - rest + low - before, min(before + rest, (part + 1) * share) - low))
            for at, some in held:
                if some > 0:
                    row[n], begin[n], count[n] = r, at, some
                    n += 1
            before += rest
    return n


def mask_labels(labels: Int64s, counts: np.ndarray, ignored: int, out: Int64s) -> None:
    out[...] = np.where(counts, labels, ignored)


def deal_evenly(costs: Int64s, ranks: int, rows: int, out: Int64s) -> None:
    unit = ranks * rows
    spent = [0] * ranks
    for first in range(0, out.size, unit):
        here = costs[first : first + unit]
        most, extra = divmod(here.size, ranks)
        own: list[list[int]] = [[] for _ in range(ranks)]
        heap = [(cost, rank) for rank, cost in enumerate(spent)]
        heapq.heapify(heap)
        for i in np.argsort(-here, kind="stable").tolist():
            rank = heapq.heappop(heap)[1]
            while len(own[rank]) >= most + (extra > 0):
                rank = heapq.heappop(heap)[1]
            extra -= len(own[rank]) == most
            own[rank].append(i)
            spent[rank] += int(here[i])
            heapq.heappush(heap, (spent[rank], rank))
        rest = iter(range(here.size, unit))
        table = [sorted(mine) + list(itertools.islice(rest, rows - len(mine))) for mine in own]
        out[first : first + unit] = first + np.array(table, np.int64).reshape(-1)


def nanoset_counts(weights: np.ndarray, sizes: Int64s, dataset: Int64s, count: Int64s) -> None:
    drawn = np.zeros(sizes.size, np.int64)
    for i in range(dataset.size):
        best = int(np.argmax(weights * max(float(i), 1.0) - drawn))
        dataset[i], count[i] = best, drawn[best]
        drawn[best] += 1


def aligned_starts(ends: Int64s, length: int, tokens: int, state: Int64s, out: Int64s) -> int:
    begins = np.concatenate([state[:1], ends])[:-1]
    free, rows, document = int(state[1]), 0, 0
    while True:
        document += int(np.searchsorted(begins[document:], free))
        if document == ends.size or begins[document] + length >= tokens:
            break
        begin = int(begins[document])
        whole = max(1, (int(ends[document]) - begin - 1) // length)  # rows that lie inside the document, or one
        out[rows : rows + whole] = begin + np.arange(whole) * length
        rows, free = rows + whole, begin + whole * length
    state[0], state[1] = ends[-1] if ends.size else state[0], free
    return rows


def pack_best_fit(lengths: Int32s, width: int, row_of: Int32s, first: Int32s, piece_of: Int32s) -> int:
    rooms: list[int] = []  # those that some row has, ascending
    rows_of: dict[int, list[int]] = {}
    rows = 0
    for piece in np.argsort(-lengths.astype(np.int64), kind="stable").tolist():
        length = int(lengths[piece])
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            row = rows_of[room].pop()
            if not rows_of[room]:
                del rows_of[room], rooms[at]
        else:
            row, room = rows, width
            rows += 1
        row_of[piece] = row
        if left := room - length:
            if left not in rows_of:
                rows_of[left] = []
                insort(rooms, left)
            rows_of[left].append(row)
    _, opened, counts = np.unique(row_of, return_index=True, return_counts=True)
    number = np.empty(rows, np.int32)
    number[np.argsort(opened)] = np.arange(rows)
    row_of[:] = number[row_of]
    first[0] = 0
    first[1 : rows + 1] = np.cumsum(counts[np.argsort(opened)])
    piece_of[:] = np.argsort(row_of, kind="stable")
    return rows


def packed_spans(
    places: Int64s,
    counts: Int64s,
    width: int,
    first: Int32s,
    piece_of: Int32s,
    ends: Int64s,
    window: Int64s,
    place: Int64s,
    count: Int64s,
) -> int:
    n = 0
    for i, (at, left) in enumerate(zip(places.tolist(), counts.tolist(), strict=True)):
        while left > 0:
            row, skip = divmod(at, width)
            todo = min(left, width - skip)
            at, left = at + todo, left - todo
            for piece in piece_of[first[row] : first[row + 1]].tolist():
                low = int(ends[piece - 1]) if piece else 0
                length = int(ends[piece]) - low
                if skip < length and todo:
                    window[n], place[n], count[n] = i, low + skip, min(length - skip, todo)
                    todo -= int(count[n])
                    n += 1
                skip = max(0, skip - length)
            if todo:
                window[n], place[n], count[n] = i, -1, todo
                n += 1
    return n
