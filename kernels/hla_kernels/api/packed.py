"""Operators of a packed qkv [B, N, 3, H, D], whose gradient is one packed tensor.

There are as many key as query heads. Two-sided calls run a custom operator whose backward writes dq, dk and dv to one
buffer; other calls unbind qkv. Options, results and errors are as for the operator without `_qkvpacked` (see `api`); a
qkv of another shape raises ValueError. Tokens come before heads, and key_padding_mask [B, N] is True for real tokens.
"""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from ..op import run
from . import Keywords, Result


def linear_attention_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`linear_attention` of qkv [B, N, 3, H, D] -> [B, N, H, D]: o = q' s sum k v'."""
    return run("linear_attention", (qkv,), **options)


def hla2_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`hla2` of qkv [B, N, 3, H, D] -> [B, N, H, D]: o = q' S C."""
    return run("hla2", (qkv,), **options)


def ahla_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`ahla` of qkv [B, N, 3, H, D] -> [B, N, H, D]: o = q' R P."""
    return run("ahla", (qkv,), **options)


def hla3_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`hla3` of qkv [B, N, 3, H, D] -> [B, N, H, D]: o = q' S Qm P."""
    return run("hla3", (qkv,), **options)


def polynomial_qkvpacked(qkv: Tensor, coefficients: Tensor, **options: Unpack[Keywords]) -> Result:
    """`polynomial` of qkv [B, N, 3, H, D] with coefficients [H, 4] -> [B, N, H, D]: o = q' (c1 P + c2 S C + c3 R P + c4
    S Qm P)."""
    return run("polynomial", (qkv,), coefficients, **options)


def softmax_attention_qkvpacked(qkv: Tensor, **options: Unpack[Keywords]) -> Result:
    """`softmax_attention` of qkv [B, N, 3, H, D] -> [B, N, H, D]."""
    return run("softmax_attention", (qkv,), **options)
