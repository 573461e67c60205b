"""Delta rules against the recurrences in plain torch of fla-core, an optional package whose code is not ours."""

from importlib import import_module

import pytest
import torch

import hla_kernels as hk
from hla_kernels import delta_rules as rules
from tests.helpers.error_rule import relative_error
from tests.ops.delta.members import B, D, H, numbers, tokens

pytest.importorskip("fla.ops", reason="the optional package fla-core is not installed")

N = 70
q, k, v = (x.float() for x in tokens(N))
beta, rate = numbers(B, N, H, high=2.0).float(), numbers(B, N, H, D, seed=3).float()
decay = numbers(B, N, H, D, seed=2, low=-1.0, high=0.0).float()
scalar, removal, root = decay[..., 0], k.flip(2), D**0.5
fixed = (1 - 2.0 ** (-5 - torch.arange(H))).log()  # of RetNet, which fla-core builds in
pairs, betas = [torch.stack([x, x.flip(1)], 3) for x in (k, v)], torch.stack([beta, beta.flip(1) / 2], 3)


def heads(*tensors):
    """Return tensors with heads before tokens."""
    return [x.transpose(1, 2) for x in tensors]


def serial(x):
    """Return the two steps of a token [B, N, H, 2, ..] as tokens [B, 2 N, H, ..]."""
    return x.transpose(2, 3).flatten(1, 2)


# rule -> (arguments of ours, recurrence of fla-core, its arguments): q times `root` undoes a scale that is built in
CASES = {
    "linear_attention": ({"k": k, "v": v}, "linear_attn.naive_recurrent_linear_attn", (q, k, v, 1.0)),
    "retnet": (rules.gla(k, v, fixed), "retention.naive_retention", heads(q * root, k, v)),
    "mamba2": (rules.gla(k, v, scalar), "simple_gla.naive_recurrent_simple_gla", (q, k, v, scalar, 1.0)),
    "gla": (rules.gla(k, v, decay), "gla.naive_recurrent_gla", (q * root, k, v, decay)),
    "delta_net": (
        rules.delta_net(k, v, beta), "delta_rule.delta_rule_recurrence", heads(q * root, k, v, beta),
    ),
    "gated_delta_net": (
        rules.gated_delta_net(k, v, scalar, beta), "gated_delta_rule.naive_recurrent_gated_delta_rule",
        (q, k, v, beta, scalar, 1.0),
    ),
    "kda": (rules.kda(k, v, decay, beta), "kda.naive_recurrent_kda", (q, k, v, decay, beta, 1.0)),
    "gated_delta_product": (
        rules.gated_delta_product(*pairs, scalar, betas), "gated_delta_product.naive_recurrent_gated_delta_product",
        (q, *map(serial, pairs), scalar, serial(betas), 1.0, None, None, False, 2),
    ),
    "rwkv7": (
        rules.rwkv7(k, v, decay, removal, rate), "generalized_delta_rule.dplr.dplr_recurrence",
        heads(q * root, k, v, -removal, rate * removal, decay),
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", CASES)
def test_rules_agree(rule):
    ours, name, theirs = CASES[rule]
    module, _, function = name.rpartition(".")
    found = getattr(import_module(f"fla.ops.{module}.naive"), function)(*theirs)
    o = found[0] if isinstance(found, tuple) else found
    o = o.transpose(1, 2) if isinstance(theirs, list) else o
    assert relative_error(o, hk.delta(q, **ours).double()) < 1e-6
