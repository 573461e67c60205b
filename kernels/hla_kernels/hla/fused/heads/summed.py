"""Higher orders by one program per head, and centred keys of first order.

Without options, as ratios, or with centred keys; float16 factors (`halves`). The forward keeps its vectors and
factors, and the operator of a ratio and of first order. The backward sums dM (and dm1) over queries and the gradients
of o alone, and its D x D algebra reads factors from shared memory, as tensor cores require. Equations as in `algebra`.
"""

import triton
import triton.language as tl

from ..algebra import ones_moments, scale_moments
from ..loops import means, read_out, sum_moments, upto, write_grads
from ..split.grads import load_weights
from ..tiles import (
    add4,
    axpy2,
    cast4,
    load4,
    load_vec,
    matvec,
    rank1,
    store4,
    store_vec,
    trans4,
    zeros2,
)
from . import NO_SPECIALIZE, at_head, of_head, own_head, ratio_of, stagger
from .halves import factors_of, get_factors, half, half_operator, put_factors, put_matrix, put_three, times
from .summed_algebra import (
    anchor_ones,
    gradient_of_head,
    load_rows3,
    ones_through,
    rows_by_memory,
    store_rows3,
    store_weights,
    stored_algebra,
    summed_algebra,
    summed_gradient,
)


@triton.jit
def one_by_one(m, ORDER: tl.constexpr, F: tl.constexpr):
    """Return (factors, units), three of either, of the moments that an order multiplies."""
    x, y, z = factors_of(m, ORDER)
    x, ux = half(x, F, F)
    y, uy = half(y, F, F)
    if ORDER == 4:
        z, uz = half(z, F, F)
    else:
        z, uz = y, uy
    return (x, y, z), (ux, uy, uz)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def summed_forward(
    q, k, v, o, vectors, matrix, factors, units, qs, ks, vs, os, N, H, scale, eps, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, L: tl.constexpr,
    KF: tl.constexpr, SAVE: tl.constexpr, BN: tl.constexpr, BO: tl.constexpr, DELAY: tl.constexpr, SLOTS: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """o of one head. SAVE: its sums, if there are any (NORM: m1 and mean value too), at vectors [B * H, K], its
    factors [B * H, KF] and units [B * H, 4], M [B * H, D, D] of a ratio and of first order."""
    SUMMED: tl.constexpr = NORM or MEAN or CENTER > 0
    pid = tl.program_id(0)
    stagger(pid, DELAY, SLOTS)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, qn, kn, vn = of_head((q, k, v), (qs, ks, vs), at, h, ALIGN)
    n = N[1]
    row = zeros2(F)
    # what a backward reads goes through memory anyway, whence tensor cores read it, and a ratio fills the registers
    HERE: tl.constexpr = not (SAVE or (NORM and F.D2 > 0))
    raw, sums, _ = sum_moments(q, k, v, q, qn, kn, vn, qn, 0, N, ORDER, SUMMED, False, True, F, F, BN, PREC)
    m = scale_moments(raw, sums, scale, n, 0.0, ORDER, CENTER, NORM or MEAN, False, F, F)
    vectors += head * L.K
    if SAVE and SUMMED:
        store_vec(vectors + L.SUM_Q, sums[0], F)
        store_vec(vectors + L.SUM_K, sums[1], F)
        store_vec(vectors + L.SUM_V, sums[2], F)
    if NORM or MEAN:
        row = axpy2(row, 1.0 / n, sums[2], F)
    p1, q1 = ones_moments(sums, scale, CENTER, F)
    m1 = row
    if HERE:
        x = m[0]
        if NORM and ORDER < 4:  # before the factors are rounded, while they are in registers
            m1 = ones_through(factors_of(m, ORDER)[1], p1, q1, ORDER, F)
        if ORDER > 1:
            factor, u = one_by_one(m, ORDER, F)
            t = factor[1]
    else:
        # one in float32 at a time: what is not read of a call is not computed; then through memory, whence tensor cores
        # get factors without registers
        AREA: tl.constexpr = (F.D1 + F.D2) * (F.D1 + F.D2)
        x, y, z = factors_of(m, ORDER)
        if ORDER > 1:
            factors += head * KF
            units += head * 4
            x, ux = half(x, F, F)
            put_matrix(factors, x, F)
            if NORM and ORDER < 4:
                m1 = ones_through(y, p1, q1, ORDER, F)
            y, uy = half(y, F, F)
            put_matrix(factors + AREA, y, F)
            uz = uy
            if ORDER == 4:
                z, uz = half(z, F, F)
                put_matrix(factors + 2 * AREA, z, F)
            put_three(units, (ux, uy, uz))
            tl.debug_barrier()  # every thread reads what others wrote
            factor, _ = get_factors(factors, units, ORDER, F)
            u = (ux, uy, uz)
            t = factor[1]
    if ORDER == 4:
        whole = times(factor[1], factor[2], F, F, F)
        t = cast4(whole, tl.float16)
        if NORM:
            m1 = matvec(whole, axpy2(zeros2(F), u[1] * u[2], p1, F), F, F)
    if ORDER == 1:
        out = cast4(x, q.dtype.element_ty)
    else:
        mt = half_operator(factor, u, t, ORDER, F)
        if NORM:
            a = anchor_ones(mt, m1, F)
            row = axpy2(row, 1.0, a, F)
            mt = rank1(mt, (-a[0], -a[1]), m1, F, F)
        out = trans4(cast4(mt, q.dtype.element_ty))
    if SAVE:
        if ORDER > 1 and HERE:
            put_factors(factors + head * KF, units + head * 4, factor, u, ORDER, F)
        if NORM:
            store_vec(vectors + L.M1, m1, F)
            store_vec(vectors + L.ROW, row, F)
        if NORM or ORDER == 1:
            store4(matrix + head * F.D * F.D, out, F, F, F.D, 1)
    o, on = at_head(o, os, at, h, ALIGN), os[1] * ALIGN
    read_out(q, o, qn, on, 0, N, out, m1, row, eps, NORM, MEAN, F, F, BO, PREC)


@triton.constexpr_function
def part_of(i, loops, late):
    """PART of `write_grads` of the i-th of so many loops."""
    if loops == 1:
        return 0
    parts = {2: [1, 2], 3: [1, 3, 4]}[loops]
    return (parts[1:] + parts[:1])[i] if late else parts[i]


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def summed_backward(
    q, k, v, g, dq, dk, dv, ratio, vectors, matrix, factors, units, room, weights, rows, qs, ks, vs, gs, dqs, dks, dvs,
    N, H, scale, eps, ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr,
    ALIGN: tl.constexpr, F: tl.constexpr, L: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr, BN: tl.constexpr,
    BO: tl.constexpr, LOOPS: tl.constexpr, WRITE: tl.constexpr, LATE: tl.constexpr, DELAY: tl.constexpr,
    SLOTS: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv of one head in LOOPS passes (`part_of`), which need less shared memory than a single pass.
    LATE: dq last."""
    SUMMED: tl.constexpr = NORM or MEAN or CENTER > 0
    pid = tl.program_id(0)
    stagger(pid, DELAY, SLOTS)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, g, qn, kn, vn, gn = of_head((q, k, v, g), (qs, ks, vs, gs), at, h, ALIGN)
    ratio = ratio_of(ratio, head, N[0], NORM)
    vectors += head * L.K
    matrix += head * F.D * F.D
    rows += head * 3 * F.D
    # of two blocks of columns dM', rows and, of hla3, all that the last pass reads do not fit in registers together
    CUT: tl.constexpr = not NORM and ORDER > 1 and F.D2 > 0
    AGAIN: tl.constexpr = CUT and ORDER == 4
    LATER: tl.constexpr = CUT or (not NORM and ORDER == 4 and LOOPS == 1)
    ROWS: tl.constexpr = SUMMED and (CUT or (not NORM and ORDER == 3 and LOOPS > 1))
    dm, row_v, one = gradient_of_head(
        q, g, qn, gn, N, eps, ratio, vectors, matrix, units + head * 4, room + head * KR, rows + 2 * F.D, LATER, ORDER,
        NORM, MEAN, F, L, BN, PREC,
    )  # fmt: skip
    if AGAIN:
        weights += head * KR
        row = stored_algebra(
            row_v, N, scale, vectors, matrix, factors + head * KF, units + head * 4, room + head * KR, weights,
            ORDER, CENTER, MEAN, F, L,
        )  # fmt: skip
    else:
        mt, w, row = summed_algebra(
            dm, row_v, one, N, scale, vectors, matrix, factors + head * KF, units + head * 4, room + head * KR,
            q.dtype.element_ty, LATER, ORDER, NORM, CENTER, MEAN, F, L,
        )  # fmt: skip
    if NORM or ROWS:
        row = rows_by_memory(rows, row, F)
    at_rows = row
    dq, dk, dv, dqn, dkn, dvn = of_head((dq, dk, dv), (dqs, dks, dvs), at, h, ALIGN)
    for part in tl.static_range(LOOPS):
        if AGAIN:
            mt = trans4(load4(matrix, F, F, F.D, 1))
            w = load_weights(weights, ORDER, L, F, F)
        if ROWS:
            row = load_rows3(at_rows, F)
        write_grads(
            q, k, v, g, dq, dk, dv, qn, kn, vn, gn, dqn, dkn, dvn, 0, N, mt, vectors + L.M1, ratio, w, 1.0, row,
            part_of(part, LOOPS, LATE), ORDER, NORM, SUMMED, F, F, BO, PREC, WRITE,
        )  # fmt: skip


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def summed_weights(
    q, g, ratio, vectors, matrix, factors, units, room, weights, rows, qs, gs, N, H, scale, eps, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, L: tl.constexpr,
    KF: tl.constexpr, KR: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """`summed_backward` up to its last pass, left to `split.apply_grads`: for heads of many tokens. Writes M unless the
    forward has."""
    pid = tl.program_id(0)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    vectors += head * L.K
    matrix += head * F.D * F.D
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    CUT: tl.constexpr = not NORM and ORDER > 1 and F.D2 > 0
    rows += head * 3 * F.D
    dm, row_v, one = gradient_of_head(
        q, g, qn, gn, N, eps, ratio_of(ratio, head, N[0], NORM), vectors, matrix, units + head * 4, room + head * KR,
        rows + 2 * F.D, CUT, ORDER, NORM, MEAN, F, L, BN, PREC,
    )  # fmt: skip
    weights += head * L.KW
    if CUT:
        row = stored_algebra(
            row_v, N, scale, vectors, matrix, factors + head * KF, units + head * 4, room + head * KR, weights,
            ORDER, CENTER, MEAN, F, L,
        )  # fmt: skip
    else:
        mt, w, row = summed_algebra(
            dm, row_v, one, N, scale, vectors, matrix, factors + head * KF, units + head * 4, room + head * KR,
            q.dtype.element_ty, False, ORDER, NORM, CENTER, MEAN, F, L,
        )  # fmt: skip
        if not NORM and ORDER > 1:
            store4(matrix, mt, F, F, 1, F.D)
        store_weights(weights, w, ORDER, L, F)
    if NORM or MEAN or CENTER > 0:
        store_rows3(rows, row, F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def summed_queries(
    q, g, ratio, vectors, matrix, units, room, parts, ones, qs, gs, N, H, chunk, eps, ORDER: tl.constexpr,
    NORM: tl.constexpr, MEAN: tl.constexpr, ALIGN: tl.constexpr, F: tl.constexpr, L: tl.constexpr, KR: tl.constexpr,
    PARTS: tl.constexpr, BN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """`summed_gradient` of one part of a head of a ratio by itself: its sums fill the registers. dM' of a head of one
    part goes to room in units of units[3], otherwise to parts [B * H, PARTS, D, D] in float32; the gradient of m1 to
    ones [B * H, PARTS, D]."""
    pid = tl.program_id(0)
    head, h, at, N, _ = own_head(pid // PARTS, N, H, 0.0)
    q, g, qn, gn = of_head((q, g), (qs, gs), at, h, ALIGN)
    ratio = ratio_of(ratio, head, N[0], NORM)
    place = head
    lo = 0
    if PARTS > 1:
        place = pid.to(tl.int64)
        lo = pid % PARTS * chunk
        N = upto(lo + chunk, N)
    dm, _, one = summed_gradient(
        q, g, qn, gn, lo, N, eps, ratio, vectors + head * L.K, matrix + head * F.D * F.D, ORDER, NORM, MEAN, F,
        L, BN, PREC,
    )  # fmt: skip
    if PARTS > 1:
        store4(parts + place * F.D * F.D, dm, F, F, F.D, 1)
    else:
        dm, unit = half(dm, F, F)
        put_matrix(room + head * KR, dm, F, F.D)
        tl.store(units + head * 4 + 3, unit)
    store_vec(ones + place * F.D, one, F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def summed_middle(
    vectors, matrix, factors, units, room, parts, ones, weights, rows, N, scale, ORDER: tl.constexpr,
    NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, F: tl.constexpr, L: tl.constexpr, KF: tl.constexpr,
    KR: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the weights and rows of one head of a ratio from what `summed_queries` left."""
    head = tl.program_id(0).to(tl.int64)
    n, scale = means(N, head, scale)
    ones += head * PARTS * F.D
    one = load_vec(ones, F)
    dm = one
    if PARTS > 1:
        parts += head * PARTS * F.D * F.D
        dm = load4(parts, F, F, F.D, 1)
        for part in tl.static_range(1, PARTS):
            dm = add4(dm, load4(parts + part * F.D * F.D, F, F, F.D, 1), F, F)
            one = axpy2(one, 1.0, load_vec(ones + part * F.D, F), F)
    _, w, row = summed_algebra(
        dm, one, one, (n, n), scale, vectors + head * L.K, matrix + head * F.D * F.D, factors + head * KF,
        units + head * 4, room + head * KR, matrix.dtype.element_ty, PARTS == 1, ORDER, NORM, CENTER, MEAN, F, L,
    )  # fmt: skip
    store_rows3(rows + head * 3 * F.D, row, F)
    store_weights(weights + head * L.KW, w, ORDER, L, F)


@triton.jit(do_not_specialize=NO_SPECIALIZE)
def summed_tokens(
    q, k, v, g, dq, dk, dv, ratio, vectors, matrix, factors, units, room, ones, rows, qs, ks, vs, gs, dqs, dks, dvs, N,
    H, scale, ORDER: tl.constexpr, NORM: tl.constexpr, CENTER: tl.constexpr, MEAN: tl.constexpr, ALIGN: tl.constexpr,
    F: tl.constexpr, L: tl.constexpr, KF: tl.constexpr, KR: tl.constexpr, BO: tl.constexpr, LOOPS: tl.constexpr,
    TILED: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv of one head of a ratio from what `summed_queries` left. TILED: as in `write_grads`."""
    pid = tl.program_id(0)
    head, h, at, N, scale = own_head(pid, N, H, scale)
    q, k, v, g, qn, kn, vn, gn = of_head((q, k, v, g), (qs, ks, vs, gs), at, h, ALIGN)
    vectors += head * L.K
    one = load_vec(ones + head * F.D, F)
    mt, w, row = summed_algebra(
        one, one, one, N, scale, vectors, matrix + head * F.D * F.D, factors + head * KF,
        units + head * 4, room + head * KR, q.dtype.element_ty, True, ORDER, NORM, CENTER, MEAN, F, L,
    )  # fmt: skip
    row = rows_by_memory(rows + head * 3 * F.D, row, F)
    dq, dk, dv, dqn, dkn, dvn = of_head((dq, dk, dv), (dqs, dks, dvs), at, h, ALIGN)
    for part in tl.static_range(LOOPS):
        write_grads(
            q, k, v, g, dq, dk, dv, qn, kn, vn, gn, dqn, dkn, dvn, 0, N, mt, vectors + L.M1, ratio_of(ratio, head,
            N[0], NORM), w, 1.0, row, part_of(part, LOOPS, False), ORDER, NORM, True, F, F, BO, PREC, TILED=TILED,
        )  # fmt: skip
