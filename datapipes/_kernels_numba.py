"""The compiled kernels, and everything they inline: one module, on purpose.

numba's on-disk cache watches only the file of the function that it compiled. A helper edited in
another file would go on being served from the cache as it was: a silently wrong order.

Nothing here is compiled at import. `kernels.py` compiles a kernel on its first use, with the
explicit signature given in `SIGNATURES` (a lazy signature costs 130-180 ms in the first batch).
`_kernels_numpy.py` gives the same bits without numba; change the two together.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

__all__ = ["KERNELS", "SIGNATURES"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_M2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_ONE, _SIXTY_FOUR = np.uint64(1), np.uint64(64)
_NARROW = np.int64(1) << np.int64(32)
_MAX = np.int64(2**63 - 1)


@njit(inline="always")
def _mix(x):
    """The finaliser of SplitMix64 (Steele, Lea & Flood 2014; constants: Stafford's variant 13)."""
    x = (x ^ (x >> _S30)) * _M1
    x = (x ^ (x >> _S27)) * _M2
    return x ^ (x >> _S31)


@njit
def _feistel(index, size, key, inverse):
    """The place of `index` in a keyed permutation of range(size): alternating Feistel rounds over the
    smallest power of two that holds size, walked until the value is inside (Black & Rogaway 2002).
    """
    if size <= 1:
        return index
    bits = 6  # fewer bits would be too small a world for eight rounds to shuffle
    while bits < 63 and (np.int64(1) << bits) < size:
        bits += 1
    low = np.uint64(bits // 2)
    high = np.uint64(bits) - low
    mask = (_ONE << low) - _ONE
    low_shift, high_shift = _SIXTY_FOUR - low, _SIXTY_FOUR - high
    n = np.uint64(size)
    x = np.uint64(index)
    while True:
        left, right = x >> low, x & mask
        if inverse:
            k = key + _GOLDEN * np.uint64(8)
            for _ in range(4):
                right ^= _mix(left + k) >> low_shift
                k -= _GOLDEN
                left ^= _mix(right + k) >> high_shift
                k -= _GOLDEN
        else:
            k = key
            for _ in range(4):
                k += _GOLDEN
                left ^= _mix(right + k) >> high_shift
                k += _GOLDEN
                right ^= _mix(left + k) >> low_shift
        x = (left << low) | right
        if x < n:
            return np.int64(x)


def permute(numbers, out, length, block, end, key, by_block, inverse):
    """out[i] = the place of numbers[i]: each epoch of `length` numbers, each block of `block` numbers
    in it, is permuted in itself; what `end` cuts off is a smaller block, so that nothing leaves it.
    """
    for i in range(numbers.size):
        number = numbers[i]
        epoch = number // length
        within = number - epoch * length
        b = within // block
        first = epoch * length + b * block
        size = min(block, length - b * block, end - first)
        k = _mix(key + _GOLDEN * np.uint64(epoch + 1))
        if by_block:
            k = _mix(k + _GOLDEN * np.uint64(b + 1))
        out[i] = first + _feistel(number - first, size, k, inverse)


@njit
def _muldiv(x, a, phi, n):
    """floor((x * a + phi) / n) and the remainder, exact, for 0 <= x <= n < 2**52, 0 <= a <= n."""
    if n <= _NARROW and a <= _NARROW and x < _NARROW:
        t = np.uint64(x) * np.uint64(a) + np.uint64(phi)
        q = t // np.uint64(n)
        return np.int64(q), np.int64(t - q * np.uint64(n))
    # The product needs up to 104 bits. The float quotient is off by a few at most; the remainder is
    # computed modulo 2**64, where it is exact because it is small, and puts the quotient right.
    q = np.int64(np.float64(x) * (np.float64(a) / np.float64(n)))
    r = np.int64(np.uint64(x) * np.uint64(a) + np.uint64(phi) - np.uint64(q) * np.uint64(n))
    while r < 0:
        q -= 1
        r += n
    while r >= n:
        q += 1
        r -= n
    return q, r


def blend_route(numbers, out_source, out_number, first, root, offset, left, right, weight, total):
    """Which source delivers each number, and as which of its own numbers; see blend.py for the law."""
    for i in range(numbers.size):
        number = numbers[i]
        p = 0
        if first.size > 1:
            p = np.searchsorted(first, number, side="right") - 1
        k = number - first[p]
        v = root[p]
        while v >= 0:
            n, a = total[v], weight[v]
            q = k // n
            x, r = _muldiv(k - q * n, a, n // 2, n)
            lefts = q * a + x
            if r + a >= n:
                k = lefts
                v = left[v]
            else:
                k -= lefts
                v = right[v]
        out_source[i] = -v - 1
        out_number[i] = offset[p, -v - 1] + k


def blend_unroute(source, numbers, out, first, offset, leaf, parent, left, weight, total, end):
    """The inverse of blend_route for one source: where its numbers stand, -1 where they never do."""
    phases = first.size
    for i in range(numbers.size):
        j = numbers[i]
        p = phases - 1
        while p > 0 and offset[p, source] > j:
            p -= 1
        v = leaf[p, source]
        if v == -1:  # not drawn in this phase: its numbers up to the next phase's offset are none
            out[i] = -1
            continue
        k = j - offset[p, source]
        child = -source - 1
        while v >= 0:
            n = total[v]
            if left[v] == child:
                w = weight[v]
                phi = n // 2
            else:
                w = n - weight[v]
                phi = n - 1 - n // 2
            q = k // w
            # the first k' with floor(((k' + 1) w + phi) / n) == (k % w) + 1
            t = _muldiv_ceil(k - q * w + 1, n, phi, w) - 1
            if q > (_MAX - t) // n:
                k = np.int64(-1)
                break
            k = q * n + t
            child = v
            v = parent[v]
        if k < 0 or k > _MAX - first[p] or first[p] + k >= end:
            out[i] = -1
        else:
            out[i] = first[p] + k


@njit
def _muldiv_ceil(x, n, phi, w):
    """ceil((x * n - phi) / w), exact, for 1 <= x <= w <= n < 2**52 and 0 <= phi < n."""
    if n <= _NARROW:
        t = np.uint64(x) * np.uint64(n) - np.uint64(phi) + np.uint64(w - 1)
        return np.int64(t // np.uint64(w))
    q = np.int64((np.float64(x) * np.float64(n) - np.float64(phi)) / np.float64(w))
    r = np.int64(np.uint64(x) * np.uint64(n) - np.uint64(phi) - np.uint64(q) * np.uint64(w))
    while r <= -w:
        q -= 1
        r += w
    while r > 0:
        q += 1
        r -= w
    return q


@intrinsic
def _pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.uintp), codegen


@intrinsic
def _prefetch(typingctx, address):
    """Brings the cache line at an address nearer, without waiting for it; any address will do, nothing faults."""

    def codegen(context, builder, signature, args):
        hint = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, hint, hint, hint])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(prefetch, [builder.inttoptr(args[0], cgutils.voidptr_t), hint(0), hint(3), hint(1)])
        return context.get_dummy_value()

    return types.void(types.uintp), codegen


@njit(inline="always")
def _copy(target, address, skip, count, code):
    """target[:] = count items of the code's dtype from item `skip` on."""
    base = _pointer(address)
    # slice first, then copy: 2.6 times as fast as indexing item by item
    if code == 2:
        target[:] = carray(base, skip + count, np.uint16)[skip:]
    elif code == 4:
        target[:] = carray(base, skip + count, np.uint32)[skip:]
    elif code == -4:
        target[:] = carray(base, skip + count, np.int32)[skip:]
    elif code == 1:
        target[:] = carray(base, skip + count, np.uint8)[skip:]
    else:
        target[:] = carray(base, skip + count, np.int64)[skip:]


_pread = types.ExternalFunction("pread", types.intp(types.int32, types.voidptr, types.uintp, types.int64))
_SCRATCH = 65536  # bytes read at a time: they are widened while they are in the processor's cache


@njit
def _read(handle, scratch, place, code, target):
    """target[:] = the items of an open file from byte `place` on; False where a read fails or comes short."""
    size = abs(code)
    done = 0
    while done < target.size:
        count = min(target.size - done, _SCRATCH // size)
        got = 0
        while got < count * size:
            read = _pread(
                np.int32(handle),
                _pointer(np.uint64(scratch.ctypes.data) + np.uint64(got)),
                np.uint64(count * size - got),
                np.int64(place + done * size + got),
            )
            if read <= 0:
                return False
            got += read
        _copy(target[done : done + count], np.uint64(scratch.ctypes.data), 0, count, code)
        done += count
    return True


_TOGETHER = 16  # stretches that are looked up in one go, so that they wait for memory together and not in turn


@njit
def _locate(starts, first, piece):
    """piece[i] = the last piece that begins at or before starts[i], of a table with one piece or more."""
    if starts.size < 3:  # one alone is found sooner by guessing each branch than by waiting for each number
        for i in range(starts.size):
            piece[i] = np.searchsorted(first, starts[i], side="right") - 1
        return
    piece[: starts.size] = 0
    left = first.size - 1
    while left > 1:
        half = left >> 1
        for i in range(starts.size):
            middle = piece[i] + half
            piece[i] = middle if first[middle] <= starts[i] else piece[i]
        left -= half


@njit
def _walk(starts, counts, out, first, address, itemcode, place, file, handle, offset):
    """Both gathers: without files that are read, `handle` is None, and what is only theirs is not compiled."""
    piece = np.zeros(_TOGETHER, np.int64)
    scratch = piece if handle is None else np.empty(_SCRATCH // 8, np.int64)
    at = 0
    alike = counts.size == 1
    for i in range(starts.size):
        if i % _TOGETHER == 0 and address.size:
            some = starts[i : i + _TOGETHER]
            _locate(some, first, piece)
            if handle is None:
                for k in range(some.size):
                    f = max(0, piece[k])
                    _prefetch(address[f] + np.uint64((some[k] - first[f]) * abs(itemcode[f])))
        start = starts[i]
        width = counts[0] if alike else counts[i]
        done = 0
        if start < 0:
            out[at : at + width] = 0
            at += width
            continue
        f = piece[i % _TOGETHER]
        while done < width:
            stop = first[f + 1]
            if stop > start + done:
                opened = np.int32(-1) if handle is None else handle[file[f]]
                if opened < -1 or (opened == -1 and address[f] == 0):
                    return f
                skip = start + done - first[f]
                count = min(width - done, stop - start - done)
                if opened == -1:
                    if done + count < width:
                        _prefetch(address[f + 1])
                    _copy(out[at : at + count], address[f], skip, count, itemcode[f])
                elif handle is not None:
                    begin = offset[file[f]] + (place[f] + skip) * abs(itemcode[f])
                    if not _read(opened, scratch, begin, itemcode[f], out[at : at + count]):
                        return np.int64(-2)
                done += count
                at += count
            f += 1
    return np.int64(-1)


def gather(starts, counts, out, first, address, itemcode):
    """Copies the tokens [start, start + count) of each stretch to `out` (1-D), end to end; one count is that of all.

    Places count over all pieces end to end: piece f holds [first[f], first[f + 1]) at address[f], as
    items of itemcode[f] (see formats). Returns -1, or the index of a piece that is not mapped yet. A
    negative start leaves zeros: padding.
    """
    return _walk(starts, counts, out, first, address, itemcode, None, None, None, None)


def gather_files(starts, counts, out, first, address, itemcode, place, file, handle, offset):
    """`gather` where some files are read by descriptor: piece f, which begins at token place[f] of file[f], whose
    tokens begin at byte offset[file[f]], through handle[file[f]]; −1 there: by address[f]; −2: not open yet.

    Returns as `gather`, and −2 where a read failed or came short; which and why is not said.
    """
    return _walk(starts, counts, out, first, address, itemcode, place, file, handle, offset)


def blocks_good(starts, counts, first, itemcode, byte, table, good):
    """Whether all blocks of 64 KiB that the stretches [start, start + count) of `gather` touch are good.

    Piece f begins at byte[f] of its file, whose block 0 is good[table[f]]; -1 there: nobody checks that file.
    """
    alike = counts.size == 1
    piece = np.zeros(_TOGETHER, np.int64)
    for i in range(starts.size):
        if i % _TOGETHER == 0 and itemcode.size:
            _locate(starts[i : i + _TOGETHER], first, piece)
        start = starts[i]
        if start < 0:
            continue
        left = counts[0] if alike else counts[i]
        f = piece[i % _TOGETHER]
        while left > 0:
            skip = start - first[f]
            count = min(left, first[f + 1] - start)
            if table[f] >= 0 and count > 0:
                size = abs(itemcode[f])
                low = byte[f] + skip * size
                for block in range(low >> 16, ((low + count * size - 1) >> 16) + 1):
                    if not good[table[f] + block]:
                        return False
            start += count
            left -= count
            f += 1
    return True


def row_documents(place, count, width, inputs, tables, positions, numbers, joins, sequences, costs):
    """What the documents of rows give, in one walk over their ends; see row_documents.py.

    Spans of tokens [place, place + count) make rows of `width` tokens, one after the other; one count is that of all;
    a negative place: padding. tables: address and length of three more arrays (an argument costs 75 ns). Pieces f hold
    the places [first[f], first[f + 1]) and begin at token begin[f] of their file; entries: (bound, address, documents),
    the pieces [bound, next bound) are of a file whose document ends are at the address. Outputs of size 0 are left out;
    sequences gets what fits. Gives (sequences, the longest), or (-1 - entry, 0) for an entry that is not mapped yet.
    """
    first = carray(_pointer(np.uint64(tables[0])), tables[1], np.int64)
    begin = carray(_pointer(np.uint64(tables[2])), tables[3], np.int64)
    entries = carray(_pointer(np.uint64(tables[4])), (tables[5], 3), np.int64)
    bounds = entries[:, 0]
    alike = count.size == 1
    row, at, number, found, longest = 0, 0, 0, 0, 0
    for k in range(place.size):
        p = place[k]
        left = count[0] if alike else count[k]
        f = 0
        if p >= 0:
            f = np.searchsorted(first, p, side="right") - 1
        while left > 0:
            take, total, address, ahead = left, 0, 0, 0
            if p >= 0:
                take = min(left, first[f + 1] - p)
                entry = np.searchsorted(bounds, f, side="right") - 1
                total = entries[entry, 2]
                if total > 0:
                    address = entries[entry, 1]
                    if address == 0:
                        return np.int64(-1 - entry), np.int64(0)
                    ahead = begin[f] + p - first[f] - at
            ends = carray(_pointer(np.uint64(address)), total, np.uint64)
            j, high = 0, total  # the first end beyond the span's first token
            while j < high:
                middle = (j + high) >> 1
                if np.int64(ends[middle]) > ahead + at:
                    high = middle
                else:
                    j = middle + 1
            stop = at + take
            while at < stop:
                until = stop
                while j < total:
                    end = np.int64(ends[j]) - ahead
                    if end > at:
                        until = min(end, stop)
                        break
                    j += 1
                if joins.size and at:
                    joins[row, at - 1] = True
                size = min(until, inputs) - at
                if size > 0:
                    if positions.size:
                        target = positions[row, at : at + size]
                        for i in range(size):
                            target[i] = i
                    if numbers.size:
                        numbers[row, at : at + size] = number
                    if found < sequences.size:
                        sequences[found] = row * inputs + at
                    if costs.size:
                        costs[row] += size * size
                    number += 1
                    found += 1
                    longest = max(longest, size)
                at = until
            left -= take
            p += take
            f += 1
        if at == width:
            row, at, number = row + 1, 0, 0
    if found < sequences.size:
        sequences[found] = row * inputs
    return np.int64(found), np.int64(longest)


def cut_documents(sequences, length, size, rank, row, begin, count):
    """What context-parallel rank `rank` of `size` holds of rows of `length` tokens whose documents begin at `sequences`
    (rows end to end); see Topology.cp_stretches. Returns how many stretches (row, begin in it, count).
    """
    parts = 2 * size
    n = 0
    i = 0
    while i < sequences.size - 1:
        r = sequences[i] // length
        left = 0
        j = i
        while j < sequences.size - 1 and sequences[j] // length == r:
            left += (sequences[j + 1] - sequences[j]) % parts
            j += 1
        share = left // parts
        before = 0
        for k in range(i, j):
            first, tokens = sequences[k] - r * length, sequences[k + 1] - sequences[k]
            chunk = tokens // parts
            rest = tokens - chunk * parts
            for turn in range(2):
                part = parts - 1 - rank if turn else rank
                if chunk > 0:
                    row[n], begin[n], count[n] = r, first + part * chunk, chunk
                    n += 1
            for turn in range(2):
                part = parts - 1 - rank if turn else rank
                low = max(before, part * share)
                held = min(before + rest, (part + 1) * share) - low
                if held > 0:
                    row[n], begin[n], count[n] = r, first + chunk * parts + low - before, held
                    n += 1
            before += rest
        i = j
    return n


def mask_labels(labels, counts, ignored, out):
    """out[r, i] = labels[r, i] where counts[r, i], else `ignored`. labels may be a view."""
    for row in range(labels.shape[0]):
        source, mask, target = labels[row], counts[row], out[row]
        for i in range(target.size):
            target[i] = source[i] if mask[i] else ignored


def deal_evenly(costs, ranks, rows, out):
    """Deals a window of samples to the ranks, a unit of ranks · rows of them after the other; see balance.py.

    costs: of the samples that exist, from the window's first on. out, of units · ranks · rows: the table [unit, rank,
    row] of which sample of the window each takes, ascending in each rank's rows of a unit; what does not exist comes
    last. Each sample, the costliest of its unit first, goes to the rank that has the least so far and has room; among
    equals the earlier sample, the lower rank. Of a unit that is cut off ranks differ by one row at most.
    """
    unit = ranks * rows
    spent = np.zeros(ranks, np.int64)
    taken = np.empty(ranks, np.int64)
    owner = np.empty(unit, np.int64)
    heap = np.empty(ranks, np.int64)
    for first in range(0, out.size, unit):
        here = max(0, min(unit, costs.size - first))
        most, extra = here // ranks, here % ranks
        taken[:] = 0
        size = 0
        for rank in range(ranks):
            size = _push(heap, size, rank, spent)
        for i in np.argsort(-costs[first : first + here], kind="mergesort"):
            while True:
                rank = heap[0]
                size = _pop(heap, size, spent)
                if taken[rank] < most + (extra > 0):
                    break
            if taken[rank] == most:
                extra -= 1
            owner[i] = rank
            taken[rank] += 1
            spent[rank] += costs[first + i]
            size = _push(heap, size, rank, spent)
        rank = 0
        for i in range(here, unit):
            while taken[rank] == rows:
                rank += 1
            owner[i] = rank
            taken[rank] += 1
        taken[:] = 0
        for i in range(unit):
            rank = owner[i]
            out[first + rank * rows + taken[rank]] = first + i
            taken[rank] += 1


@njit
def _push(heap, size, rank, spent):
    """A heap of ranks, the one that has spent the least at its top, the lower one among equals; gives its size."""
    at = size
    while at > 0:
        above = heap[(at - 1) >> 1]
        if spent[above] < spent[rank] or (spent[above] == spent[rank] and above < rank):
            break
        heap[at] = above
        at = (at - 1) >> 1
    heap[at] = rank
    return size + 1


@njit
def _pop(heap, size, spent):
    """Takes the top away; gives the heap's size."""
    size -= 1
    rank, at = heap[size], 0
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size:
            a, b = heap[child], heap[child + 1]
            if spent[b] < spent[a] or (spent[b] == spent[a] and b < a):
                child += 1
        below = heap[child]
        if spent[rank] < spent[below] or (spent[rank] == spent[below] and rank < below):
            break
        heap[at] = below
        at = child
    heap[at] = rank
    return size


def nanoset_counts(weights, sizes, dataset, count):
    """The greedy blend of Nanoset and Megatron: dataset[i] is the source of sample i, count[i] how many
    of that source came before it (an error-minimising choice, first index on ties).
    """
    drawn = np.zeros(sizes.size, np.int64)
    for i in range(dataset.size):
        x = max(np.float64(i), 1.0)
        best = 0
        worst = weights[0] * x - np.float64(drawn[0])
        for d in range(1, sizes.size):
            error = weights[d] * x - np.float64(drawn[d])
            if error > worst:
                best, worst = d, error
        dataset[i] = best
        count[i] = drawn[best]
        drawn[best] += 1


def aligned_starts(ends, length, tokens, state, out):
    """Where the rows of windows aligned to documents begin (align.py has the law), for the documents with these ends;
    state: the first one's beginning, and the first place where a row may begin. Returns how many.
    """
    begin, free = state[0], state[1]
    rows = 0
    for i in range(ends.size):
        if begin >= free and begin + length < tokens:
            place = begin
            out[rows] = place
            rows += 1
            while place + 2 * length < ends[i]:
                place += length
                out[rows] = place
                rows += 1
            free = place + length
        begin = ends[i]
    state[0], state[1] = begin, free
    return rows


def pack_best_fit(lengths, width, row_of, first, piece_of):
    """Pieces into rows of `width` tokens: longest first, each into the row with the least room that holds it (best-fit
    decreasing; Johnson 1973). Rows are then numbered by their first piece; piece_of[first[r]:first[r + 1]] are those
    of row r, ascending. Returns how many rows.
    """
    n = lengths.size
    at = np.zeros(width + 2, np.int64)  # counting sort, longest first, equal ones as they come
    for i in range(n):
        at[width - lengths[i] + 1] += 1
    for i in range(width + 1):
        at[i + 1] += at[i]
    order = np.empty(n, np.int32)
    for i in range(n):
        order[at[width - lengths[i]]] = i
        at[width - lengths[i]] += 1
    leaves = 1
    while leaves < width:
        leaves *= 2
    filled = np.zeros(2 * leaves, np.bool_)  # a binary tree over room 0 … width − 1: is there a row of this room?
    top = np.full(width, -1, np.int32)  # of each room, the row that came to it last
    below = np.empty(n, np.int32)  # and the one before it
    rows = 0
    for i in range(n):
        length = np.int64(lengths[order[i]])
        room = np.int64(-1)
        if length < width:
            v = leaves + length
            if not filled[v]:
                while v > 1 and (v & 1 or not filled[v + 1]):
                    v >>= 1
                if v > 1:
                    v += 1
                    while v < leaves:
                        v *= 2
                        if not filled[v]:
                            v += 1
            if v >= leaves and filled[v]:
                room = v - leaves
        if room < 0:
            row = np.int32(rows)
            rows += 1
            room = np.int64(width)
        else:
            row = top[room]
            top[room] = below[row]
            if top[room] < 0:
                v = leaves + room
                filled[v] = False
                while v > 1 and not filled[v ^ 1]:
                    v >>= 1
                    filled[v] = False
        row_of[order[i]] = row
        room -= length
        if room > 0:
            below[row] = top[room]
            top[room] = row
            v = leaves + room
            while v > 0 and not filled[v]:
                filled[v] = True
                v >>= 1
    number = order  # of the row that was opened as k-th; it is not needed as an order any more
    for i in range(rows):
        number[i] = -1
    first[: rows + 1] = 0
    count = np.int32(0)
    for i in range(n):
        if number[row_of[i]] < 0:
            number[row_of[i]] = count
            count += 1
        row_of[i] = number[row_of[i]]
        first[row_of[i] + 1] += 1
    for i in range(rows):
        first[i + 1] += first[i]
        below[i] = first[i]
    for i in range(n):
        piece_of[below[row_of[i]]] = i
        below[row_of[i]] += 1
    return rows


def packed_spans(places, counts, width, first, piece_of, ends, window, place, count):
    """What windows of packed rows are made of: for each stretch its window, the place in the table of its first token
    (−1: padding), its tokens; see pack.py. Returns how many.
    """
    n = 0
    for i in range(places.size):
        at, left = places[i], counts[i]
        while left > 0:
            row = at // width
            skip = at - row * width
            todo = min(left, width - skip)
            at += todo
            left -= todo
            for k in range(first[row], first[row + 1]):
                if todo == 0:
                    break
                piece = piece_of[k]
                low = np.int64(0)
                if piece > 0:
                    low = ends[piece - 1]
                length = ends[piece] - low
                if skip >= length:
                    skip -= length
                    continue
                window[n], place[n], count[n] = i, low + skip, min(length - skip, todo)
                todo -= count[n]
                skip = 0
                n += 1
            if todo > 0:
                window[n], place[n], count[n] = i, -1, todo
                n += 1
    return n


KERNELS = {
    kernel.__name__: kernel
    for kernel in (
        aligned_starts,
        blend_route,
        blend_unroute,
        blocks_good,
        cut_documents,
        deal_evenly,
        gather,
        gather_files,
        mask_labels,
        nanoset_counts,
        pack_best_fit,
        packed_spans,
        permute,
        row_documents,
    )
}

_I64, _I32 = "int64[::1]", "int32[::1]"
_MAPPED_I64, _MAPPED_I32 = (types.Array(item, 1, "C", readonly=True) for item in (types.int64, types.int32))
SIGNATURES: "dict[str, Any]" = {
    "permute": f"void({_I64}, {_I64}, int64, int64, int64, uint64, boolean, boolean)",
    "blend_route": f"void({', '.join([_I64] * 5)}, int64[:, ::1], {', '.join([_I64] * 4)})",
    "blend_unroute": f"void(int64, {_I64}, {_I64}, {_I64}, int64[:, ::1], int64[:, ::1], "
    f"{_I64}, {_I64}, {_I64}, {_I64}, int64)",
    "gather": f"int64({_I64}, {_I64}, {_I64}, {_I64}, uint64[::1], {_I64})",
    "gather_files": f"int64({', '.join([_I64] * 4)}, uint64[::1], {', '.join([_I64] * 3)}, int32[::1], {_I64})",
    "blocks_good": f"boolean({', '.join([_I64] * 6)}, boolean[::1])",
    "row_documents": f"UniTuple(int64, 2)({_I64}, {_I64}, int64, int64, {_I64}, "
    f"int64[:, ::1], int64[:, ::1], boolean[:, ::1], int32[::1], {_I64})",
    "cut_documents": f"int64(int32[::1], int64, int64, int64, {_I64}, {_I64}, {_I64})",
    "mask_labels": "void(int64[:, :], boolean[:, :], int64, int64[:, ::1])",
    "deal_evenly": f"void({_I64}, int64, int64, {_I64})",
    "nanoset_counts": f"void(float64[::1], {_I64}, {_I64}, {_I64})",
    "aligned_starts": f"int64({_I64}, int64, int64, {_I64}, {_I64})",
    "pack_best_fit": f"int64({_I32}, int64, {_I32}, {_I32}, {_I32})",
    "packed_spans": types.int64(
        types.int64[::1],
        types.int64[::1],
        types.int64,
        _MAPPED_I32,
        _MAPPED_I32,
        _MAPPED_I64,
        types.int64[::1],
        types.int64[::1],
        types.int64[::1],
    ),
}
