"""Inputs of the delta family, and the published recurrences of its members."""

import torch

from hla_kernels import delta_rules as rules

B, H, D, DV = 2, 3, 8, 5
DOUBLE = torch.float64


def tokens(n, seed=0, d=D, dv=DV, dtype=DOUBLE):
    """(q, k, v) with keys of length 1."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, n, H, width, generator=g, dtype=DOUBLE).to(dtype) for width in (d, d, dv))
    return q, torch.nn.functional.normalize(k, dim=-1), v


def numbers(*shape, seed=1, low=0.0, high=1.0):
    g = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(*shape, generator=g, dtype=DOUBLE)


def full(n, rank, writes, channels, strength=1.0):
    """Keyword arguments of a call without structure."""
    g = torch.Generator().manual_seed(n)
    a, b = (torch.randn(B, n, H, rank, D, generator=g, dtype=DOUBLE) / D for _ in range(2))
    k = torch.randn(B, n, H, writes, D, generator=g, dtype=DOUBLE)
    v = torch.randn(B, n, H, writes, DV, generator=g, dtype=DOUBLE)
    shape = {"none": None, "head": (H,), "token": (B, n, H), "channel": (B, n, H, D)}[channels]
    log_f = None if shape is None else -strength * torch.rand(*shape, generator=g, dtype=DOUBLE)
    return {"k": k, "v": v, "log_f": log_f, "a": a, "b": b}


def write(k, v):
    return k.unsqueeze(-1) * v.unsqueeze(-2)


def erase(s, k, beta):
    """(I - beta k k') S."""
    return s - write(beta.unsqueeze(-1) * k, torch.einsum("bhd,bhde->bhe", k, s))


def member(name, n):
    """(arguments of the operator, the published recurrence as a step)."""
    _, k, v = tokens(n)
    beta, decay = numbers(B, n, H, high=2.0), numbers(B, n, H, D, seed=2, low=-1.0, high=0.0)
    scalar, fixed, rate = decay[..., 0], decay[0, 0, :, 0], numbers(B, n, H, D, seed=3)
    pairs = [torch.stack([x, x.flip(1)], -2) for x in (k, v)]
    betas = torch.stack([beta, beta.flip(1) / 2], -1)
    removal = k.flip(2)
    given = {
        "linear_attention": lambda: {"k": k, "v": v},
        "retnet": lambda: rules.gla(k, v, fixed),
        "mamba2": lambda: rules.gla(k, v, scalar),
        "gla": lambda: rules.gla(k, v, decay),
        "hdla": lambda: rules.hdla(k, v, decay, beta),
        "delta_net": lambda: rules.delta_net(k, v, beta),
        "gated_delta_net": lambda: rules.gated_delta_net(k, v, scalar, beta),
        "kda": lambda: rules.kda(k, v, decay, beta),
        "gated_delta_product": lambda: rules.gated_delta_product(*pairs, scalar, betas),
        "rwkv7": lambda: rules.rwkv7(k, v, decay, removal, rate),
    }[name]()

    def step(t, s):
        f = {"gla": decay, "hdla": decay, "kda": decay, "rwkv7": decay, "retnet": fixed.expand(B, n, H).unsqueeze(-1)}
        f = f.get(name, scalar.unsqueeze(-1))[:, t].exp().unsqueeze(-1)
        kt, vt, bt = k[:, t], v[:, t], beta[:, t]
        if name in ("delta_net", "gated_delta_net", "kda"):
            s = s if name == "delta_net" else f * s
            return erase(s, kt, bt) + write(bt.unsqueeze(-1) * kt, vt)
        if name == "hdla":
            return erase(f * erase(s, kt, bt), kt, bt) + write(kt, vt)
        if name == "gated_delta_product":
            s = f * s
            for i in range(2):
                key, value, b = pairs[0][:, t, :, i], pairs[1][:, t, :, i], betas[:, t, :, i]
                s = erase(s, key, b) + write(b.unsqueeze(-1) * key, value)
            return s
        if name == "rwkv7":
            read = torch.einsum("bhd,bhde->bhe", removal[:, t], s)
            return f * s - write(rate[:, t] * removal[:, t], read) + write(kt, vt)
        return (s if name == "linear_attention" else f * s) + write(kt, vt)

    return given, step


MEMBERS = (
    "linear_attention", "retnet", "mamba2", "gla", "hdla", "delta_net", "gated_delta_net", "kda",
    "gated_delta_product", "rwkv7",
)  # fmt: skip
