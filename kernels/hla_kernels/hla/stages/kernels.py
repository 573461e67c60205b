"""States of segments and outputs of segments.

A term (x, y, z) is o_i = s Sum_{j<=i} g^(i-j) (x_i.y_j) z_j, or with REVERSE the sum over j >= i of g^(j-i). Terms
of one launch are added. X, Y, Z hold the indices of their tensors in TOKENS. Within a chunk the weights are a tile; the
state H = Sum g^(.) y_j z_j' carries what lies before it. With FRAME, segments are frames, whose tokens see each other:
all weights come from the state, which includes the own frame. An extra float32 channel (EXTRAS) belongs to some
tensors: in x and y it adds a product to the scores, in z an extra channel to the output.
"""

import triton
import triton.language as tl

from .tiles import FREE, column, log2_of, powers, product, rounded, rows_of, tile, weighted


@triton.jit
def added(
    state, y, z, ye, kept, power, DECAY: tl.constexpr, EXACT: tl.constexpr, SCORED: tl.constexpr, TF32: tl.constexpr
):  # fmt: skip
    """Return the state (H, its row for the extra channel of y) after a chunk; power: the decay of each token until the
    chunk's end, kept: the decay of the state."""
    h, row = state
    zf = z.to(tl.float32)
    if DECAY:
        h = h * kept
        zf = zf * power[:, None]
        if EXACT:  # the gradient of the decay is a difference of large sums over such states: rounding would decide it
            h = product(tl.trans(y), rounded(zf - rounded(zf, z, TF32).to(tl.float32), z, TF32), h, TF32)
        h = product(tl.trans(y), rounded(zf, z, TF32), h, TF32)
    else:
        h = product(tl.trans(y), z, h, TF32)
    if SCORED:
        row = row * kept + tl.sum(ye[:, None] * zf, 0)
    return h, row


@triton.jit
def added_column(col, y, ze, kept, power):
    """Return Sum g^(.) y_j e_j after a chunk, for the extra channel e of z."""
    return col * kept + tl.sum(y.to(tl.float32) * (ze * power)[:, None], 0)


@triton.jit
def places(y_width: tl.constexpr, z_width: tl.constexpr, row: tl.constexpr, column: tl.constexpr,
           YP: tl.constexpr, first, BZ: tl.constexpr):  # fmt: skip
    """Return the places of H, and which of them exist. A state is [D, Dz], [D, Dz + 1] with an extra channel of z, or
    [D + 1, Dz] with one of y; row, column: distances between rows and between columns."""
    d, e = tl.arange(0, YP), first + tl.arange(0, BZ)
    return d[:, None] * row + e[None, :] * column, (d < y_width)[:, None] & (e < z_width)[None, :]


@triton.jit
def no_state(YP: tl.constexpr, BZ: tl.constexpr):
    """Return the state before the first token."""
    return tl.zeros([YP, BZ], tl.float32), tl.zeros([BZ], tl.float32)


@triton.jit
def get_state(ptr, y_width: tl.constexpr, z_width: tl.constexpr, row: tl.constexpr, column: tl.constexpr, first,
              YP: tl.constexpr, BZ: tl.constexpr, SCORED: tl.constexpr):  # fmt: skip
    """Load H and the row for the extra channel of y."""
    place, exists = places(y_width, z_width, row, column, YP, first, BZ)
    h, own = tl.load(ptr + place, exists, other=0.0), tl.zeros([BZ], tl.float32)
    if SCORED:
        e = first + tl.arange(0, BZ)
        own = tl.load(ptr + y_width * row + e * column, e < z_width, other=0.0)
    return h, own


@triton.jit
def put_state(ptr, state, y_width: tl.constexpr, z_width: tl.constexpr, stride: tl.constexpr, first, YP: tl.constexpr,
              BZ: tl.constexpr, SCORED: tl.constexpr):  # fmt: skip
    """Store what `get_state` loads; stride: numbers per row."""
    place, exists = places(y_width, z_width, stride, 1, YP, first, BZ)
    tl.store(ptr + place, state[0], exists)
    if SCORED:
        e = first + tl.arange(0, BZ)
        tl.store(ptr + y_width * stride + e, state[1], e < z_width)


@triton.jit(do_not_specialize=FREE)
def causal_states(
    TOKENS, EXTRAS, LOG2, OUT, at, sizes,
    Y: tl.constexpr, Z: tl.constexpr, WY: tl.constexpr, WZ: tl.constexpr, YP: tl.constexpr, BZ: tl.constexpr,
    C: tl.constexpr, SIZE: tl.constexpr, SCORED: tl.constexpr, VALUED: tl.constexpr, REVERSE: tl.constexpr,
    FRAME: tl.constexpr, EXACT: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Compute the own state of a segment, the sum over its tokens alone, into OUT [B H, segments, SIZE], but of the
    last one, behind which there are no tokens (unless FRAME). sizes: N, heads, segments, tokens per segment."""
    N, heads, segments, length = sizes[0], sizes[1], sizes[2], sizes[3]
    own = segments if FRAME else segments - 1
    bh, segment = tl.program_id(0) // own, tl.program_id(0) % own
    if REVERSE and not FRAME:
        segment += 1
    b, h = bh // heads, bh % heads
    first = tl.program_id(1) * BZ
    log2 = log2_of(LOG2, h)
    yp = rows_of(TOKENS[Y], at, Y, b, h)
    zp = rows_of(TOKENS[Z], at, Z, b, h)
    i = tl.arange(0, C)
    state = tl.zeros([YP, BZ], tl.float32), tl.zeros([BZ], tl.float32)
    col = tl.zeros([YP], tl.float32)
    end = tl.minimum(N, (segment + 1) * length)
    count = tl.cdiv(end - segment * length, C)
    for c in range(count):
        start = segment * length + (count - 1 - c if REVERSE else c) * C
        row = start + i
        inside = row < end
        n = tl.minimum(C, end - start)
        y = tile(yp, row, inside, 0, WY, YP)
        z = tile(zp, row, inside, first, WZ, BZ)
        ye = 0.0
        if SCORED:
            ye = column(EXTRAS, at, Y, b, h, row, inside, heads, N)
        power = powers(log2, i if REVERSE else n - 1 - i, LOG2 is not None)
        kept = powers(log2, n, LOG2 is not None)
        state = added(state, y, z, ye, kept, power, LOG2 is not None, EXACT, SCORED, TF32)
        if VALUED:
            col = added_column(col, y, column(EXTRAS, at, Z, b, h, row, inside, heads, N), kept, power)
    OUT += (bh.to(tl.int64) * segments + segment) * SIZE
    put_state(OUT, state, WY, WZ, WZ + 1 if VALUED else WZ, first, YP, BZ, SCORED)
    if VALUED:
        d = tl.arange(0, YP)
        tl.store(OUT + d * (WZ + 1) + WZ, col, d < WY)


@triton.jit(do_not_specialize=["sizes"])
def causal_carry(
    LOG2, STATES, FIRST, sizes, SIZE: tl.constexpr, REVERSE: tl.constexpr, FRAME: tl.constexpr, BS: tl.constexpr
):  # fmt: skip
    """Turn own states of segments into the states that enter them, or with FRAME leave them, in place. FIRST
    [B H, SIZE]: the state before all segments, or None. The decay is per token, or with FRAME per segment. sizes as in
    `causal_states`."""
    N, heads, segments, length = sizes[0], sizes[1], sizes[2], sizes[3]
    bh = tl.program_id(0)
    log2 = log2_of(LOG2, bh % heads)
    e = tl.program_id(1) * BS + tl.arange(0, BS)
    state = tl.zeros([BS], tl.float32)
    if FIRST is not None:
        state = tl.load(FIRST + bh.to(tl.int64) * SIZE + e, e < SIZE, other=0.0)
    own_segments = segments if FRAME else segments - 1
    unit = 1 if FRAME else length  # of the decay
    for s in range(segments):
        segment = segments - 1 - s if REVERSE else s
        ptr = STATES + (bh.to(tl.int64) * segments + segment) * SIZE + e
        own = tl.load(ptr, (e < SIZE) & (s < own_segments), other=0.0)
        if not FRAME:
            tl.store(ptr, state, e < SIZE)
        state = state * powers(log2, tl.minimum(unit, N - segment * length), LOG2 is not None) + own
        if FRAME:
            tl.store(ptr, state, e < SIZE)


@triton.jit
def extras(
    TOKENS, EXTRAS, STATE, LOG2, OUT, at, sizes, scale, eps, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr,
    WIDTH: tl.constexpr, STRIDE: tl.constexpr, XP: tl.constexpr, C: tl.constexpr, HELD: tl.constexpr,
    DIVIDED: tl.constexpr, REVERSE: tl.constexpr, FRAME: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Compute the extra channel of the output of a segment, plus eps for a divisor, and return the extra channel of the
    state after it. It is a separate loop: together with the other channels it would not fit into registers."""
    N, heads, segments, length = sizes[0], sizes[1], sizes[2], sizes[3]
    bh, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    b, h = bh // heads, bh % heads
    log2 = log2_of(LOG2, h)
    xp = rows_of(TOKENS[X], at, X, b, h)
    yp = rows_of(TOKENS[Y], at, Y, b, h)
    i, d = tl.arange(0, C), tl.arange(0, XP)
    col = tl.zeros([XP], tl.float32)
    if HELD:
        col = tl.load(STATE + d * STRIDE, d < WIDTH, other=0.0)
    end = tl.minimum(N, (segment + 1) * length)
    count = tl.cdiv(end - segment * length, C)
    for c in range(count):
        start = segment * length + (count - 1 - c if REVERSE else c) * C
        row = start + i
        inside = row < end
        n = tl.minimum(C, end - start)
        x = tile(xp, row, inside, 0, WIDTH, XP)
        inner = tl.zeros([C], tl.float32)
        if not FRAME:
            y = tile(yp, row, inside, 0, WIDTH, XP)
            ze = column(EXTRAS, at, Z, b, h, row, inside, heads, N)
            a = product(y, tl.trans(x), tl.zeros([C, C], tl.float32), TF32)
            inner = tl.sum(weighted(a, log2, i, REVERSE, LOG2 is not None) * ze[:, None], 0)
        entering = powers(log2, n - i if REVERSE else i + 1, LOG2 is not None)
        out = (tl.sum(x.to(tl.float32) * col[None, :], 1) * entering + inner) * scale
        if DIVIDED:
            out += eps
        tl.store(OUT + (b.to(tl.int64) * N + row) * heads + h, out, inside)
        if not FRAME:
            leaving = powers(log2, i if REVERSE else n - 1 - i, LOG2 is not None)
            col = added_column(col, y, ze, powers(log2, n, LOG2 is not None), leaving)
    return col


@triton.jit
def pairs_of(
    TOKENS, EXTRAS, LOG2, PARTNER, at, partner_at, sizes, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr,
    WIDTHS: tl.constexpr, WZ: tl.constexpr, XP: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
    SCORED: tl.constexpr, REVERSE: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Return the sum of (i - j) w_ij over pairs in one chunk, for a segment and a block of channels."""
    N, heads, segments, length = sizes[0], sizes[1], sizes[2], sizes[3]
    bh, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    b, h = bh // heads, bh % heads
    first = tl.program_id(1) * BZ
    log2 = log2_of(LOG2, h)
    i = tl.arange(0, C)
    f = i.to(tl.float32)
    total = tl.zeros([C], tl.float32)
    end = tl.minimum(N, (segment + 1) * length)
    for c in range(tl.cdiv(end - segment * length, C)):
        row = segment * length + c * C + i
        inside = row < end
        p = tile(rows_of(PARTNER, partner_at, 0, b, h), row, inside, first, WZ, BZ)
        for m in tl.static_range(len(X)):
            xp = rows_of(TOKENS[X[m]], at, X[m], b, h)
            yp = rows_of(TOKENS[Y[m]], at, Y[m], b, h)
            zp = rows_of(TOKENS[Z[m]], at, Z[m], b, h)
            x = tile(xp, row, inside, 0, WIDTHS[m], XP[m])
            y = tile(yp, row, inside, 0, WIDTHS[m], XP[m])
            z = tile(zp, row, inside, first, WZ, BZ)
            a = product(y, tl.trans(x), tl.zeros([C, C], tl.float32), TF32)
            if SCORED[m]:
                xe = column(EXTRAS, at, X[m], b, h, row, inside, heads, N)
                a += column(EXTRAS, at, Y[m], b, h, row, inside, heads, N)[:, None] * xe[None, :]
            other = product(z, tl.trans(p), tl.zeros([C, C], tl.float32), TF32)
            distance = f[:, None] - f[None, :] if REVERSE else f[None, :] - f[:, None]
            total += tl.sum(weighted(a, log2, i, REVERSE, LOG2 is not None) * other * distance, 1)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=FREE)
def causal_outputs(
    TOKENS, EXTRAS, STATES, LAST, LOG2, BEFORE, OUT, OUT_EXTRA, REST, PARTNER, SUMS, at, partner_at, sizes, scale,
    eps, X: tl.constexpr, Y: tl.constexpr, Z: tl.constexpr, WIDTHS: tl.constexpr, SIZES: tl.constexpr,
    HELD: tl.constexpr, WZ: tl.constexpr, XP: tl.constexpr, BZ: tl.constexpr, C: tl.constexpr,
    SCORED: tl.constexpr, VALUED: tl.constexpr, DIVIDED: tl.constexpr, REVERSE: tl.constexpr, FRAME: tl.constexpr,
    INTRA: tl.constexpr, INNER: tl.constexpr, EXACT: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Compute OUT of the tokens of a segment, the sum of the terms. sizes as in `causal_states`.

    STATES: a tensor per term, see `causal_carry`; None: the segment is the whole sequence and begins at zero. HELD:
    numbers per segment, and between rows and columns, of each. LAST: a tensor [B H, SIZE] per term, receives the state
    after all segments, or None. BEFORE: tokens laid out as OUT that are added, or None. DIVIDED: divide OUT by
    OUT_EXTRA + eps, and store that divisor. INNER: OUT is a later operand. REST: receives the rounding error of OUT.
    PARTNER: tokens p; SUMS [B H, segments, blocks, 3] receives Sum x_i, Sum i x_i (i from the start of the segment),
    x_i the product of p_i and the part of the output from the states, and with INTRA the sum of (i - j) w_ij over pairs
    in one chunk, for the gradient of the decay (see `launch`).
    """
    N, heads, segments, length = sizes[0], sizes[1], sizes[2], sizes[3]
    bh, segment = tl.program_id(0) // segments, tl.program_id(0) % segments
    b, h = bh // heads, bh % heads
    first = tl.program_id(1) * BZ
    log2 = log2_of(LOG2, h)
    i = tl.arange(0, C)
    stored = segment == (0 if REVERSE else segments - 1)
    E: tl.constexpr = WZ + 1 if VALUED else WZ
    if VALUED:
        ptr = OUT_EXTRA
        if STATES is not None:
            ptr = STATES[0] + (bh.to(tl.int64) * segments + segment) * HELD[0][0] + WZ * HELD[0][2]
        col = extras(
            TOKENS, EXTRAS, ptr, LOG2, OUT_EXTRA, at, sizes, scale, eps, X[0], Y[0], Z[0], WIDTHS[0], HELD[0][1], XP[0],
            C, STATES is not None, DIVIDED, REVERSE, FRAME, TF32,
        )  # fmt: skip
        if LAST is not None:
            d = tl.arange(0, XP[0])
            tl.store(LAST[0] + bh.to(tl.int64) * SIZES[0] + d * E + WZ, col, (d < WIDTHS[0]) & stored)
        tl.debug_barrier()
    pairs = 0.0
    if INTRA:
        pairs = pairs_of(
            TOKENS, EXTRAS, LOG2, PARTNER, at, partner_at, sizes, X, Y, Z, WIDTHS, WZ, XP, BZ, C, SCORED, REVERSE, TF32
        )
    held = ()
    for m in tl.static_range(len(X)):
        if STATES is None:
            held = held + (no_state(XP[m], BZ),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            ptr = STATES[m] + (bh.to(tl.int64) * segments + segment) * HELD[m][0]
            one = get_state(ptr, WIDTHS[m], WZ, HELD[m][1], HELD[m][2], first, XP[m], BZ, SCORED[m])
            held = held + (one,)  # type: ignore[assignment]  # noqa: RUF005
    # outputs are contiguous [B, N, H, Dz]
    stride = heads.to(tl.int64) * WZ
    start = b.to(tl.int64) * N * stride + h * WZ
    sums, moments = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    end = tl.minimum(N, (segment + 1) * length)
    count = tl.cdiv(end - segment * length, C)
    for c in range(count):
        local = (count - 1 - c if REVERSE else c) * C
        row = segment * length + local + i
        inside = row < end
        n = tl.minimum(C, end - segment * length - local)
        entering = powers(log2, n - i if REVERSE else i + 1, LOG2 is not None)
        leaving = powers(log2, i if REVERSE else n - 1 - i, LOG2 is not None)
        kept = powers(log2, n, LOG2 is not None)
        log2 += 0.0  # else the powers in `weighted` would stay in registers during the loop
        turned = tl.zeros([BZ, C], tl.float32)
        whole = tl.zeros([C, BZ], tl.float32)
        after = ()
        for m in tl.static_range(len(X)):
            xp = rows_of(TOKENS[X[m]], at, X[m], b, h)
            yp = rows_of(TOKENS[Y[m]], at, Y[m], b, h)
            zp = rows_of(TOKENS[Z[m]], at, Z[m], b, h)
            x = tile(xp, row, inside, 0, WIDTHS[m], XP[m])
            state = held[m]  # type: ignore[var-annotated]
            ye = 0.0
            if SCORED[m]:
                xe = column(EXTRAS, at, X[m], b, h, row, inside, heads, N)
            if not FRAME:
                y = tile(yp, row, inside, 0, WIDTHS[m], XP[m])
                z = tile(zp, row, inside, first, WZ, BZ)
                a = product(y, tl.trans(x), tl.zeros([C, C], tl.float32), TF32)
                if SCORED[m]:
                    ye = column(EXTRAS, at, Y[m], b, h, row, inside, heads, N)
                    a += ye[:, None] * xe[None, :]
                a = weighted(a, log2, i, REVERSE, LOG2 is not None)
                turned = product(tl.trans(z), rounded(a, z, TF32), turned, TF32)
            high = rounded(state[0], x, TF32)
            low = rounded(state[0] - high.to(tl.float32), x, TF32)  # before the product, or registers spill
            whole = product(x, high, whole, TF32)
            # in TF32, states are as precise as tokens, but the extra channel cancels most of what a frame reads of them
            if EXACT or not TF32 or (FRAME and SCORED[m]):
                whole = product(x, low, whole, TF32)
            if SCORED[m]:
                whole += xe[:, None] * state[1][None, :]
            if not FRAME:
                state = added(state, y, z, ye, kept, leaving, LOG2 is not None, EXACT, SCORED[m], TF32)
            after = after + (state,)  # type: ignore[assignment]  # noqa: RUF005
        held = after
        out = (whole * entering[:, None] + tl.trans(turned)) * scale
        if DIVIDED:
            out = out / tl.load(OUT_EXTRA + (b.to(tl.int64) * N + row) * heads + h, inside, other=1.0)[:, None]
        e = first + tl.arange(0, BZ)
        place = start + row.to(tl.int64)[:, None] * stride + e[None, :]
        exists = inside[:, None] & (e < WZ)[None, :]
        if BEFORE is not None:
            out += tl.load(BEFORE + place, exists, other=0.0)
        near = rounded(out, out.to(OUT.dtype.element_ty), INNER and TF32)
        tl.store(OUT + place, near, exists)
        if REST is not None:
            tl.store(REST + place, (out - near.to(tl.float32)).to(REST.dtype.element_ty), exists)
        if PARTNER is not None:
            p = tile(rows_of(PARTNER, partner_at, 0, b, h), row, inside, first, WZ, BZ)
            x_sum = tl.sum(whole * p.to(tl.float32), 1) * entering
            sums += x_sum
            moments += x_sum * (local + i).to(tl.float32)
    if LAST is not None:  # noqa: SIM102
        if stored:
            for m in tl.static_range(len(X)):
                ptr = LAST[m] + bh.to(tl.int64) * SIZES[m]
                state = held[m]
                put_state(ptr, state, WIDTHS[m], WZ, E, first, XP[m], BZ, SCORED[m])
    if PARTNER is not None:
        at_sums = SUMS + ((bh.to(tl.int64) * segments + segment) * tl.num_programs(1) + tl.program_id(1)) * 3
        tl.store(at_sums, tl.sum(sums, 0) * scale)
        tl.store(at_sums + 1, tl.sum(moments, 0) * scale)
        tl.store(at_sums + 2, pairs * scale)
