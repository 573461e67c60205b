"""Loops as Triton writes them, shortened."""

import pytest

from tests.ops.fused.offline.pipeline import overwritten

LOOP = """
    %x = ttg.local_alloc : () -> !ttg.memdesc<{buffers}x64x32xbf16, #shared, #smem, mutable>
    %w = ttg.local_alloc : () -> !ttg.memdesc<3x32x64xbf16, #shared1, #smem, mutable>
    %x_0 = ttg.memdesc_index %x[%c0] : !ttg.memdesc<64x32xbf16>
    %t0 = ttg.async_copy_global_to_local %p0, %x_0 mask %m : <64x32xbf16>
    %w_0 = ttg.memdesc_index %w[%c0] : !ttg.memdesc<32x64xbf16>
    %t1 = ttg.async_copy_global_to_local %p1, %w_0 mask %m : <32x64xbf16>
    %x_1 = ttg.memdesc_index %x[%c1] : !ttg.memdesc<64x32xbf16>
    %t2 = ttg.async_copy_global_to_local %p2, %x_1 mask %m : <64x32xbf16>
    %w_1 = ttg.memdesc_index %w[%c1] : !ttg.memdesc<32x64xbf16>
    %t3 = ttg.async_copy_global_to_local %p3, %w_1 mask %m : <32x64xbf16>
    %r = scf.for %i = %c0 to %n step %c1 iter_args(%acc = %zero) -> (tensor<64x64xf32>)  : i32 {{
      %x_2 = ttg.memdesc_index %x[%j] : !ttg.memdesc<64x32xbf16>
      %w_2 = ttg.memdesc_index %w[%j] : !ttg.memdesc<32x64xbf16>
      %d = ttng.warp_group_dot %x_2, %w_2, %acc {{isAsync = true}} : tensor<64x64xf32, #mma>
      %e:3 = ttng.warp_group_dot_wait %d, %x_2, %w_2 {{pendings = {pendings} : i32}} : tensor<64x64xf32, #mma>
      %x_3 = ttg.memdesc_index %x[%k] : !ttg.memdesc<64x32xbf16>
      %t4 = ttg.async_copy_global_to_local %p4, %x_3 mask %m : <64x32xbf16>
      %w_3 = ttg.memdesc_index %w[%k] : !ttg.memdesc<32x64xbf16>
      %t5 = ttg.async_copy_global_to_local %p5, %w_3 mask %m : <32x64xbf16>
      scf.yield %e#0 : tensor<64x64xf32, #mma>
    }}
    %f = ttng.warp_group_dot_wait %r {{pendings = 0 : i32}} : tensor<64x64xf32, #mma>
"""


@pytest.mark.parametrize(
    ("buffers", "pendings", "found"),
    [
        (2, 1, ["%d %x"]),  # the copy of this turn takes the place of what its product reads
        (2, 0, []),  # which is done
        (3, 1, []),  # another place, and the product of the turn before is done
        (3, 2, ["%d %w", "%d %x"]),  # or is not
        (4, 2, ["%d %w"]),
    ],
)
def test_what_is_copied_over(buffers, pendings, found):
    assert overwritten(LOOP.format(buffers=buffers, pendings=pendings)) == found
