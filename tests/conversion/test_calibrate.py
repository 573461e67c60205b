"""Calibration against least squares written out, its report, and what it does to a model."""

import copy
import math

import numpy as np
import pytest
import timm
import torch

from tests.helpers.tiny_pairs import inputs, pair
from zoo.conversion.calibrate import best_projections, calibrate
from zoo.conversion.calibration_terms import EXPONENTS
from zoo.conversion.hooks import TeacherStudent, forward, layers_of, record_calls, record_mixer_calls, replace_layers
from zoo.conversion.least_squares import NormalEquations
from zoo.mixers.base import EPS

ANCHORED = {"feature_map": "identity", "normalize": False, "center": "k", "mean_path": True}


def tokens_of_layer(teacher, student, batches, name):
    """q, k, v of one layer under the teacher's hidden states, read off the teacher itself, [B, N, H, D] each."""
    found = []
    layer = teacher.get_submodule(name)
    for batch in batches:
        with record_calls(teacher, [name]) as calls, torch.no_grad():
            forward(teacher, batch)
        x = calls[name].arguments[0] if calls[name].arguments else calls[name].keywords["hidden_states"]
        if hasattr(layer, "qkv"):
            qkv = layer.qkv(x).unflatten(-1, (3, layer.num_heads, -1)).unbind(2)
        else:
            qkv = [p(x).unflatten(-1, (layer.heads, -1)) for p in (layer.to_q, layer.to_k, layer.to_v)]
        found.append([t.detach().double() for t in qkv])
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def softmax(q, k, v):
    s = torch.einsum("bnhd,bmhd->bhnm", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhnm,bmhd->bnhd", s.softmax(-1), v)


def columns(x, head):
    """[K, B, N, H, D] -> [B N D, K] of one head."""
    return x[:, :, :, head].flatten(1).T.numpy()


@pytest.mark.parametrize("kind", ["vit", "dit"])
def test_poly_takes_numpys_least_squares_of_the_definition(kind):
    teacher, student, batches = pair(kind, "poly", **ANCHORED)
    report = {row.layer: row for row in calibrate(student, teacher, batches)}
    for name, layer in TeacherStudent(teacher, student).layers.items():
        q, k, v = tokens_of_layer(teacher, student, batches, name)
        n, scale = q.shape[1], q.shape[-1] ** -0.5
        a = torch.einsum("bnhd,bmhd->bhnm", q * scale, k - k.mean(1, keepdim=True)) / n
        mean = v.mean(1, keepdim=True)
        terms = [torch.einsum("bhnm,bmhd->bnhd", w, v - mean) for w in (a, a @ a.mT, a @ a, a @ a.mT @ a)]
        x, wanted = torch.stack([*terms, mean.expand_as(v)]), softmax(q, k, v)
        for head in range(q.shape[2]):
            target = wanted[:, :, head].flatten().numpy()
            w, *_ = np.linalg.lstsq(columns(x, head), target, rcond=None)
            found = [*layer.mixer.coefficients[head].tolist(), 1 + float(layer.mixer.gains.shift.detach()[head])]
            np.testing.assert_allclose(found, w, rtol=2e-3, atol=2e-4)
            left = np.square(target - columns(x, head) @ w).sum() / np.square(target).sum()
            assert report[name].heads[head] == pytest.approx(1 - left, abs=1e-5)


@pytest.mark.parametrize("kind", ["vit", "dit"])
def test_power_takes_the_exponent_with_the_least_error_of_numpys_least_squares(kind):
    teacher, student, batches = pair(kind, "la")
    calibrate(student, teacher, batches)
    for name, layer in TeacherStudent(teacher, student).layers.items():
        q, k, v = tokens_of_layer(teacher, student, batches, name)
        wanted, mean = softmax(q, k, v), v.mean(1, keepdim=True).expand_as(v)
        for head in range(q.shape[2]):
            target, errors = wanted[:, :, head].flatten().numpy(), {}
            for exponent in EXPONENTS:
                fq, fk = (power(t, exponent) for t in (q, k))
                a = torch.einsum("bnhd,bmhd->bhnm", fq, fk)
                o = torch.einsum("bhnm,bmhd->bnhd", a / (a.sum(-1, keepdim=True) + q.shape[1] * EPS), v)
                x = columns(torch.stack([o, mean]), head)
                w, *_ = np.linalg.lstsq(x, target, rcond=None)
                errors[exponent] = (np.square(target - x @ w).sum(), *w)
            best = min(errors, key=lambda p: errors[p][0])
            assert layer.mixer.phi_q.power[head].item() == pytest.approx(best, rel=1e-5)
            assert layer.mixer.phi_k.power[head].item() == pytest.approx(best, rel=1e-5)
            found = [g[head].item() for g in (layer.mixer.gains.gain, layer.mixer.gains.shift)]
            np.testing.assert_allclose(found, errors[best][1:], rtol=2e-3, atol=2e-4)
            assert float(layer.mixer.gains.temperature.detach()[head]) == 1


def power(x, exponent):
    """The length of relu(x) in the direction of its power."""
    y = x.clamp(min=0)
    return (y**exponent * (y.norm(dim=-1) / (y**exponent).norm(dim=-1))[..., None]).nan_to_num(0)


def neighbours(v, prefix, width):
    """v [B, N, H, D] at each place of a kernel over its square grid, zeros beyond it, [width^2, B, N, H, D]."""
    side, r = math.isqrt(v.shape[1] - prefix), width // 2
    image = torch.nn.functional.pad(v[:, prefix:].permute(0, 2, 3, 1).unflatten(-1, (side, side)), [r] * 4)
    moved = [image[..., y : y + side, x : x + side] for y in range(width) for x in range(width)]
    tokens = [torch.nn.functional.pad(m.flatten(-2), (prefix, 0)).permute(0, 3, 1, 2) for m in moved]
    return torch.stack(tokens)


@pytest.mark.parametrize(("kind", "prefix"), [("vit", 1), ("dit", 0)])
def test_local_values_take_numpys_least_squares_of_the_neighbours(kind, prefix):
    teacher, student, batches = pair(kind, "taylor2", normalize=False, lepe=3)
    report = {row.layer: row for row in calibrate(student, teacher, batches)}
    for name, layer in TeacherStudent(teacher, student).layers.items():
        q, k, v = tokens_of_layer(teacher, student, batches, name)
        n, scale = q.shape[1], q.shape[-1] ** -0.5
        s = torch.einsum("bnhd,bmhd->bhnm", q * scale, k - k.mean(1, keepdim=True))
        mean = v.mean(1, keepdim=True)
        terms = [torch.einsum("bhnm,bmhd->bnhd", w / n, v - mean) for w in (s, s.square() / 2)]
        x = torch.cat([torch.stack([*terms, mean.expand_as(v)]), neighbours(v, prefix, 3)])
        wanted = softmax(q, k, v)
        kernels = layer.mixer.lepe.weight.detach().flatten(1).unflatten(0, (q.shape[2], -1))  # [H, D, places]
        for head in range(q.shape[2]):
            target = wanted[:, :, head].flatten().numpy()
            w, *_ = np.linalg.lstsq(columns(x, head), target, rcond=None)
            np.testing.assert_allclose(kernels[head], np.tile(w[3:], (kernels.shape[1], 1)), rtol=2e-3, atol=2e-4)
            left = np.square(target - columns(x, head) @ w).sum() / np.square(target).sum()
            assert report[name].heads[head] == pytest.approx(1 - left, abs=1e-5)


@pytest.mark.parametrize(
    ("mixer", "options"),
    [
        ("la", {}),
        ("la", {"feature_map": "elu1"}),
        ("la", {"lepe": 3}),
        ("mala", {}),
        ("rala", {}),
        ("inline", {}),
        ("mesa", {}),
        ("resolvent", {}),
        ("taylor2", {"lepe": 3}),
        ("la", {"feature_map": "softmax_pair"}),
        ("ahla", ANCHORED),
        ("hla2", ANCHORED),
        ("poly", {}),
        ("poly", ANCHORED),
        ("taylor2", {}),
        ("taylor2", {"normalize": False}),
        ("taylor2", {"width": 4}),
        ("multipole", {"blocks": [2, 2], "radius": 0, "lepe": 3}),
    ],
)
@pytest.mark.parametrize("kind", ["vit", "dit", "sd3"])
def test_the_reported_part_is_what_the_mixer_then_explains(kind, mixer, options):
    teacher, student, batches = pair(kind, mixer, **options)
    before = explained(teacher, student, batches)
    report = calibrate(student, teacher, batches)
    after = explained(teacher, student, batches)
    for row in report:
        assert row.r2 == pytest.approx(after[row.layer], abs=2e-3)
        assert after[row.layer] >= before[row.layer] - 2e-3
        assert row.r2_centred <= 1 and 0 <= row.key_shift <= 1 and 0 <= row.query_shift <= 1
        assert row.fp16_part == pytest.approx(row.largest / 65504)


def explained(teacher, student, batches):
    """1 - |softmax - mixer|^2 / |softmax|^2 of each layer, on the tokens that the student's mixer gets."""
    found, two = {}, TeacherStudent(teacher, student)
    sums = {name: [0.0, 0.0] for name in two.layers}
    for batch in batches:
        _, calls = two.calls(batch)
        for name, layer in two.layers.items():
            with record_mixer_calls({name: layer}) as seen, torch.no_grad():
                calls[name].repeat(layer)
                q, k, v, ctx = seen[name].arguments
                wanted, ours = softmax(q, k, v), layer.mixer(q, k, v, ctx)
            sums[name][0] += float((wanted - ours).square().sum())
            sums[name][1] += float(wanted.square().sum())
    for name, (error, power) in sums.items():
        found[name] = 1 - error / power
    return found


def test_dependent_terms_have_the_solution_of_least_norm():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, 1, 4, generator=g, dtype=torch.float64)
    terms, target = torch.stack([x[0], 1e-6 * x[1], x[0] + x[1]]), torch.randn(3, 7, 1, 4, generator=g).double()
    equations = NormalEquations(1, 3)
    for half in (slice(0, 1), slice(1, 3)):
        equations.add(terms[:, half], target[half])
    w = equations.solve()
    best = np.linalg.lstsq(columns(terms[:2], 0), target.flatten().numpy(), rcond=None)
    assert float(equations.errors(w)[0][0]) == pytest.approx(float(best[1][0]), rel=1e-9)
    assert float(equations.errors(w)[1][0]) == pytest.approx(float(target.square().sum()))


def test_the_projections_are_the_best_of_their_rank():
    """No other product of this rank has a smaller mean square error of the scores: Eckart and Young, tried at random
    and by a truncation of the channels."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(200, 6, generator=g).double() @ torch.randn(6, 6, generator=g).double() for _ in range(2))
    a, b = best_projections((q.T @ q)[None], (k.T @ k)[None], 2)
    error = lambda m: float((q @ k.T - q @ m @ k.T).square().sum())  # noqa: E731
    s = torch.linalg.svdvals(q @ k.T)
    assert error(a[0] @ b[0].T) == pytest.approx(float(s[2:].square().sum()), rel=1e-6)
    assert error(torch.diag(torch.tensor([1.0, 1, 0, 0, 0, 0]).double())) > error(a[0] @ b[0].T)


def test_replaced_layers_are_a_model_with_those_layers_converted():
    teacher, student, batches = pair("vit", "la")
    with replace_layers(teacher, layers_of(student)), torch.no_grad():
        found = forward(teacher, batches[0])
    torch.testing.assert_close(found, forward(student, batches[0]))


def test_refusals():
    teacher, student, batches = pair("vit", "la", gains=False)
    with pytest.raises(ValueError, match="convert with gains=True"):
        calibrate(student, teacher, batches)
    with pytest.raises(ValueError, match="has no converted attention layer"):
        calibrate(teacher, teacher, batches)
    teacher, student, batches = pair("vit", "la")
    with pytest.raises(ValueError, match="of the teacher is 'la', not softmax"):
        calibrate(student, copy.deepcopy(student), batches)
    with pytest.raises(ValueError, match="at least one batch"):
        calibrate(student, teacher, [])
    with pytest.raises(ValueError, match="not the model that was converted"):
        calibrate(student, pair("dit", "la")[0], inputs("vit"))
    deeper = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=9, embed_dim=48, num_heads=3)
    with pytest.raises(ValueError, match=r"student has no layer blocks.*not the model that was converted"):
        calibrate(student, deeper, batches)
    with pytest.raises(ValueError, match="a tensor, or a dict of a model's keywords, got str"):
        calibrate(student, teacher, ["images"])
