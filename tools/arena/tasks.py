"""Tasks of the arena: generators of token sequences and point sets with targets."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from arena.flow import darcy, darcy_points

IGNORED = -100  # target of tokens that are not scored


@dataclass(frozen=True)
class Task:
    """Task of the arena.

    draw: (batch, size, generator) -> inputs [B, N] of symbols or [B, N, channels] of numbers, and targets: classes
      [B, N], `IGNORED` for tokens without one, or numbers [B, N].
    size: default size. inputs, outputs: size -> number of symbols or channels, and of classes; no classes: relative L2.
    grid: size -> layout of the tokens; None for a set of points.
    layers: default depth. one_token: whether the targets must be decoded from the last token alone (compression).
    """

    draw: Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
    size: int
    inputs: Callable[[int], int]
    outputs: Callable[[int], int] | None
    grid: Callable[[int], tuple[int, ...] | None]
    layers: int = 2
    one_token: bool = False
    symbols: bool = True


def integers(high: int, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=g, device=g.device)


def orders(batch: int, n: int, g: torch.Generator) -> Tensor:
    """Random permutations of range(n), [B, n]."""
    return torch.rand(batch, n, generator=g, device=g.device).argsort(1)


SYMBOLS = 64  # keys, and values, of recall and memorisation
WORDS = 16  # content symbols of compression and copying


def recall(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall (MQAR, arXiv 2312.04927): `size` pairs (key, value), then the keys in new order.

    The target of each key is its value. The publication spaces the queries by a power law; here they follow directly.
    """
    keys = orders(batch, SYMBOLS, g)[:, :size]
    values = integers(SYMBOLS, (batch, size), g)
    asked = orders(batch, size, g)
    pairs = torch.stack([keys, SYMBOLS + values], 2).flatten(1)
    inputs = torch.cat([pairs, keys.gather(1, asked)], 1)
    return inputs, torch.cat([torch.full_like(pairs, IGNORED), values.gather(1, asked)], 1)


def memorise(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Memorisation (MAD, arXiv 2403.17844): the values of `size` keys, the same in all examples, none in the input."""
    facts = torch.randint(SYMBOLS, (SYMBOLS,), generator=torch.Generator().manual_seed(0)).to(g.device)
    keys = integers(SYMBOLS, (batch, size), g)
    inputs = torch.stack([keys, torch.full_like(keys, SYMBOLS)], 2).flatten(1)
    return inputs, torch.stack([torch.full_like(keys, IGNORED), facts[keys]], 2).flatten(1)


def compress(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Compression (MAD, arXiv 2403.17844): all `size` random symbols, decoded from the output of one last token."""
    words = integers(WORDS, (batch, size), g)
    end = words.new_full((batch, 1), WORDS)
    return torch.cat([words, end], 1), torch.cat([words, end.new_full(end.shape, IGNORED)], 1)


def copy(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Selective copying (MAD, arXiv 2403.17844): `size` symbols among 3 times as many blanks, asked for in order."""
    words = integers(WORDS, (batch, size), g)
    places = orders(batch, 4 * size, g)[:, :size].sort(1)[0]
    tokens = words.new_full((batch, 4 * size), WORDS).scatter(1, places, words)
    asked = words.new_full((batch, size), WORDS + 1)
    return torch.cat([tokens, asked], 1), torch.cat([torch.full_like(tokens, IGNORED), words], 1)


def compose(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Function composition (arXiv 2501.19215): the tables of f and g on `size` symbols and x; the target is g(f(x)).

    One layer of pairwise attention needs a width that grows with `size`; attention of pairs of tokens does not.
    """
    f, h = integers(size, (batch, size), g), integers(size, (batch, size), g)
    x = integers(size, (batch, 1), g)
    inputs = torch.cat([f, h, x], 1)
    ignored = inputs.new_full((batch, 2 * size), IGNORED)
    return inputs, torch.cat([ignored, h.gather(1, f.gather(1, x))], 1)


def match(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Match3 (arXiv 2306.02896): whether two other tokens j < k have x_i + x_j + x_k = 0 modulo M, for each token i.

    M is the number of such pairs, so that 63 % of the answers are yes.
    """
    modulus = modulus_of(size)
    x = integers(modulus, (batch, size), g)
    hits = (x[:, :, None, None] + x[:, None, :, None] + x[:, None, None, :]) % modulus == 0
    i = torch.arange(size, device=x.device)
    pairs = (i[:, None, None] != i[:, None]) & (i[:, None, None] != i) & (i[:, None] < i)
    return x, (hits & pairs).any(-1).any(-1).long()


def modulus_of(size: int) -> int:
    return math.comb(size - 1, 2)


def carry(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Addition of numbers of `size` digits, least significant first: token (a, b), target digit of the sum.

    Half of the tokens are drawn with a + b = 9, which pass a carry on, so that carries depend on distant tokens.
    """
    a, b = integers(10, (batch, size), g), integers(10, (batch, size), g)
    b = torch.where(integers(2, (batch, size), g) == 1, 9 - a, b)
    digits, over = [], torch.zeros_like(a[:, 0])
    for i in range(size):
        total = a[:, i] + b[:, i] + over
        digits.append(total % 10)
        over = total // 10
    return 10 * a + b, torch.stack(digits, 1)


def charges(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """`size` points in the unit square with charges -1 and 1; the target is the potential at each point.

    u_i = mean over j != i of c_j / sqrt(|x_i - x_j|^2 + 0.01). Inputs: x, y, charge.
    """
    points = torch.rand(batch, size, 2, generator=g, device=g.device)
    charge = 2.0 * integers(2, (batch, size), g) - 1
    inverse = ((points[:, :, None] - points[:, None]).square().sum(-1) + 0.01).rsqrt()
    inverse.diagonal(dim1=1, dim2=2).zero_()
    potential = (inverse * charge[:, None]).mean(2)
    return torch.cat([points, charge[..., None]], 2), potential


def row(tokens: Callable[[int], int]) -> Callable[[int], tuple[int, ...]]:
    """Layout of a sequence."""
    return lambda size: (1, tokens(size))


TASKS = {
    "recall": Task(recall, 32, lambda n: 2 * SYMBOLS, lambda n: SYMBOLS, row(lambda n: 3 * n)),
    "memorise": Task(memorise, 32, lambda n: SYMBOLS + 1, lambda n: SYMBOLS, row(lambda n: 2 * n)),
    "compress": Task(compress, 32, lambda n: WORDS + 1, lambda n: WORDS, row(lambda n: n + 1), one_token=True),
    "copy": Task(copy, 16, lambda n: WORDS + 2, lambda n: WORDS, row(lambda n: 5 * n)),
    "compose": Task(compose, 12, lambda n: n, lambda n: n, row(lambda n: 2 * n + 1), layers=1),
    "match": Task(match, 10, modulus_of, lambda n: 2, row(lambda n: n), layers=1),
    "carry": Task(carry, 24, lambda n: 100, lambda n: 10, row(lambda n: n)),
    "charges": Task(charges, 256, lambda n: 3, None, lambda n: None, symbols=False),
    "darcy": Task(darcy, 64, lambda n: 3, None, lambda n: (n, n), layers=4, symbols=False),
    "darcy_points": Task(darcy_points, 64, lambda n: 3, None, lambda n: None, layers=4, symbols=False),
}
