"""Tasks of the arena: generators of token sequences and point sets with targets."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from arena.flow import burgers, darcy, darcy_points

Draw = Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
IGNORED = -100  # target of tokens that are not scored


@dataclass(frozen=True)
class Task:
    """Task of the arena.

    draw: (batch, size, generator) -> inputs [B, N] of symbols or [B, N, channels] of numbers, and targets: classes
      [B, N], `IGNORED` for tokens without one, or numbers [B, N].
    size: default size. inputs, outputs: size -> number of symbols or channels, and of classes; no classes: relative L2.
    grid: size -> layout of the tokens; None for a set of points.
    layers, dim: default depth and width. one_token: whether the targets must be decoded from the last token alone
    (compression). symbols: whether inputs are symbols. causal: whether targets depend on earlier tokens only.
    convolution: whether every block starts with a short causal convolution, as in the publications of these tasks.
    Without it, softmax has 17 % of `recall` with 8 pairs after 1,000 steps at width 64, and with it 100 % after 500.
    steps, batch_size, samples: training by default; samples is the number of different examples, 0 for new ones in
      each step. lessons: draws training examples, if not `draw`.
    """

    draw: Draw
    size: int
    inputs: Callable[[int], int]
    outputs: Callable[[int], int] | None
    grid: Callable[[int], tuple[int, ...] | None]
    layers: int = 2
    dim: int = 128
    one_token: bool = False
    symbols: bool = True
    causal: bool = True
    convolution: bool = False
    steps: int = 1500
    batch_size: int = 128
    samples: int = 0
    lessons: Draw | None = None


def integers(high: int, shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=g, device=g.device)


def orders(batch: int, n: int, g: torch.Generator) -> Tensor:
    """Random permutations of range(n), [B, n]."""
    return torch.rand(batch, n, generator=g, device=g.device).argsort(1)


KEYS = 64  # keys, and as many values, of recall and memorisation
WORDS = 16  # content symbols of compression and copying


def recall(batch: int, size: int, g: torch.Generator, distinct: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall (MQAR, arXiv 2312.04927): `size` pairs (key, value), then the keys in new order.

    The target of each key is its value. The publication spaces the queries by a power law; here they follow directly.
    distinct: number of different pairs of each example, [B, 1]; the others repeat them. None: all are different.
    """
    keys = orders(batch, KEYS, g)[:, :size]
    values = integers(KEYS, (batch, size), g)
    if distinct is not None:
        slots = torch.arange(size, device=keys.device).expand_as(keys)
        slots = torch.where(slots < distinct, slots, integers(size, (batch, size), g) % distinct)
        keys, values = keys.gather(1, slots), values.gather(1, slots)
    asked = orders(batch, size, g)
    pairs = torch.stack([keys, KEYS + values], 2).flatten(1)
    inputs = torch.cat([pairs, keys.gather(1, asked)], 1)
    return inputs, torch.cat([torch.full_like(pairs, IGNORED), values.gather(1, asked)], 1)


def recall_lessons(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """`recall` with 2 to `size` different pairs, log-uniform; a third has all. The publication mixes sizes as well."""
    share = (1.5 * torch.rand(batch, 1, generator=g, device=g.device)).clamp(max=1)
    distinct = (2 * (size / 2) ** share).round().long().clamp(min=1, max=size)
    return recall(batch, size, g, distinct)


def memorise(batch: int, size: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Memorisation (MAD, arXiv 2403.17844): the values of `size` keys, the same in all examples, none in the input."""
    facts = torch.randint(KEYS, (KEYS,), generator=torch.Generator().manual_seed(0)).to(g.device)
    keys = integers(KEYS, (batch, size), g)
    inputs = torch.stack([keys, torch.full_like(keys, KEYS)], 2).flatten(1)
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
    """Function composition (arXiv 2501.19215): the tables of f and g on `size` symbols, then `size` symbols x.

    The target of each x is g(f(x)); the publication asks for one x. One layer of pairwise attention needs a width that
    grows with `size`; attention of pairs of tokens does not.
    """
    f, h, x = (integers(size, (batch, size), g) for _ in range(3))
    ignored = torch.full_like(f, IGNORED)
    return torch.cat([f, h, x], 1), torch.cat([ignored, ignored, h.gather(1, f.gather(1, x))], 1)


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
    return lambda size: (tokens(size), 1)


def numbers(
    draw: Draw,
    size: int,
    grid: Callable[[int], tuple[int, ...] | None],
    layers: int,
    batch: int,
    steps: int = 1000,
    samples: int = 1024,
) -> Task:
    """Task with 3 channels per point and a number as target."""
    return Task(
        draw, size, lambda n: 3, None, grid, layers, symbols=False, causal=False, batch_size=batch, steps=steps,
        samples=samples,
    )  # fmt: skip


TASKS = {
    "recall": Task(
        recall,
        32,
        lambda n: 2 * KEYS,
        lambda n: KEYS,
        row(lambda n: 3 * n),
        dim=64,
        convolution=True,
        lessons=recall_lessons,
        steps=1000,
    ),
    "memorise": Task(
        memorise, 32, lambda n: KEYS + 1, lambda n: KEYS, row(lambda n: 2 * n), convolution=True, steps=800
    ),
    "compress": Task(
        compress,
        8,
        lambda n: WORDS + 1,
        lambda n: WORDS,
        row(lambda n: n + 1),
        one_token=True,
        convolution=True,
        steps=1000,
    ),
    "copy": Task(copy, 16, lambda n: WORDS + 2, lambda n: WORDS, row(lambda n: 5 * n), convolution=True, steps=1200),
    "compose": Task(compose, 8, lambda n: n, lambda n: n, row(lambda n: 3 * n), layers=1, steps=2000),
    "match": Task(match, 6, modulus_of, lambda n: 2, row(lambda n: n), layers=1, causal=False),
    "carry": Task(carry, 24, lambda n: 100, lambda n: 10, row(lambda n: n), steps=1200),
    "charges": numbers(charges, 256, lambda n: None, 2, 128, samples=0),
    "burgers": numbers(burgers, 256, lambda n: (n, 1), 4, 32),
    "darcy": numbers(darcy, 64, lambda n: (n, n), 4, 8, 800),
    "darcy_points": numbers(darcy_points, 64, lambda n: None, 4, 8, 800),
}
