"""Flows with exact or converged solutions.

Darcy: -div(a grad u) = 1 on the unit square, u = 0 on its border. Burgers: u_t + u u_x = nu u_xx on a circle.
"""

import math

import torch
from torch import Tensor

VALUES = (3.0, 12.0)  # of the coefficient a
SCALE = 100.0  # on u, whose largest values are near 0.01
VISCOSITY = 0.01
ITERATIONS = 30  # of the solver; the preconditioned matrix has condition 4, an iteration divides the error by 3


def coefficients(batch: int, n: int, g: torch.Generator) -> Tensor:
    """a [B, n, n]: 12 where a Gaussian field with covariance (-Laplace + 9)^-2, Neumann, is positive, else 3.

    The coefficients of the data of arXiv 2010.08895 (Fourier neural operator), A.3.2.
    """
    k = torch.arange(n, device=g.device, dtype=torch.float64)
    waves = torch.cos(math.pi * k[:, None] * (k + 0.5) / n)  # [frequency, cell]
    deviation = 1 / (math.pi**2 * (k[:, None] ** 2 + k**2) + 9)
    deviation[0, 0] = 0
    noise = torch.randn(batch, n, n, generator=g, device=g.device, dtype=torch.float64)
    field = waves.T @ (noise * deviation) @ waves
    low, high = VALUES
    return low + (high - low) * (field > 0).to(field.dtype)


def apply_operator(a: Tensor, u: Tensor) -> Tensor:
    """Compute -div(a grad u) at the centres of n x n cells, [B, n, n]: flux a at faces, the harmonic mean of two cells.

    At the border u = 0 lies half a cell away.
    """
    n = a.shape[-1]
    out = torch.zeros_like(u)
    for axis in (1, 2):
        below, above = (t.narrow(axis, 0, n - 1) for t in (a, u)), (t.narrow(axis, 1, n - 1) for t in (a, u))
        (a0, u0), (a1, u1) = below, above
        flux = 2 * a0 * a1 / (a0 + a1) * (u1 - u0)
        out.narrow(axis, 0, n - 1).sub_(flux)
        out.narrow(axis, 1, n - 1).add_(flux)
        for end in (0, n - 1):
            out.select(axis, end).add_(2 * a.select(axis, end) * u.select(axis, end))
    return out * n**2


def solve(a: Tensor) -> Tensor:
    """Solve the flow for a [B, n, n] in float64, by conjugate gradients preconditioned with sine transforms."""
    n = a.shape[-1]
    k = torch.arange(1, n + 1, device=a.device, dtype=a.dtype)
    sines = torch.sin(math.pi * k[:, None] * (k - 0.5) / n)
    sines = sines / sines.norm(dim=1, keepdim=True)  # orthonormal eigenvectors of the operator with a = 1
    values = (2 * n * torch.sin(math.pi * k / (2 * n))) ** 2
    inverse = 1 / (values[:, None] + values)

    def precondition(r: Tensor) -> Tensor:
        return sines.T @ (inverse * (sines @ r @ sines.T)) @ sines

    u, r = torch.zeros_like(a), torch.ones_like(a)
    p = z = precondition(r)
    rz = (r * z).sum((1, 2), keepdim=True)
    for _ in range(ITERATIONS):
        ap = apply_operator(a, p)
        step = rz / (p * ap).sum((1, 2), keepdim=True).clamp(min=torch.finfo(a.dtype).tiny)
        u, r = u + step * p, r - step * ap
        z = precondition(r)
        old, rz = rz, (r * z).sum((1, 2), keepdim=True)
        p = z + rz / old.clamp(min=torch.finfo(a.dtype).tiny) * p
    return u


def darcy(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Darcy flow on size x size cells; inputs x, y and the scaled coefficient of each cell, target 100 u."""
    a = coefficients(batch, size, g)
    u = solve(a)
    x = (torch.arange(size, device=a.device, dtype=a.dtype) + 0.5) / size
    places = torch.stack(torch.meshgrid(x, x, indexing="ij"), -1).expand(batch, -1, -1, -1)
    inputs = torch.cat([places, (a[..., None] - 7.5) / 4.5], -1)
    return inputs.flatten(1, 2).float(), (SCALE * u).flatten(1).float()


def darcy_points(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """A random quarter of the cells of `darcy`, in random order, other ones in each example."""
    inputs, targets = darcy(batch, size, g)
    chosen = torch.rand(targets.shape, generator=g, device=targets.device).argsort(1)[:, : size**2 // 4]
    return inputs.gather(1, chosen[..., None].expand(-1, -1, 3)), targets.gather(1, chosen)


def velocities(batch: int, n: int, g: torch.Generator) -> Tensor:
    """Random u [B, n] on a circle of length 1, with mean 0 and covariance 625 (-d^2 + 25)^-2.

    The initial values of the data of arXiv 2010.08895 (Fourier neural operator), A.3.1, which keeps the mean.
    """
    k = 2 * math.pi * torch.arange(n // 2 + 1, device=g.device, dtype=torch.float64)
    noise = torch.randn(batch, n, generator=g, device=g.device, dtype=torch.float64)
    deviation = 25 / (k**2 + 25)
    deviation[0] = 0
    return torch.fft.irfft(torch.fft.rfft(noise) * deviation, n) * n**0.5


def later(u: Tensor, time: float) -> Tensor:
    """Solve Burgers' equation for initial values u [B, n] of mean 0, by the Cole-Hopf transform u = -2 nu (log phi)_x.

    phi satisfies the heat equation, which multiplies its Fourier coefficients.
    """
    n = u.shape[-1]
    k = 2 * math.pi * torch.arange(n // 2 + 1, device=u.device, dtype=u.dtype)
    integral = torch.fft.irfft(torch.fft.rfft(u) / (1j * k.clamp(min=1)), n)  # its constant cancels
    phi = torch.fft.rfft((-integral / (2 * VISCOSITY)).exp()) * (-VISCOSITY * time * k**2).exp()
    return -2 * VISCOSITY * torch.fft.irfft(1j * k * phi, n) / torch.fft.irfft(phi, n)


def burgers(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Burgers' equation at `size` points of the circle; inputs cos, sin and the initial value, target the one at 1."""
    u = velocities(batch, size, g)
    angle = 2 * math.pi * torch.arange(size, device=u.device, dtype=u.dtype) / size
    inputs = torch.stack([angle.cos().expand_as(u), angle.sin().expand_as(u), u], -1)
    return inputs.float(), later(u, 1.0).float()
