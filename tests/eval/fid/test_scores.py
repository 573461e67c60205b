"""Scores against closed forms, definitions, torch-fidelity and torchmetrics."""

import numpy as np
import pytest
import torch

from tests.helpers.small_images import DIM, SmallNetwork, noise_images, small_extractor
from zoo.eval.fid import FidOptions, score
from zoo.eval.fid.scores import extrapolate, frechet_distance, inception_score, kernel_distance, precision_recall
from zoo.eval.fid.statistics import Gaussian, Moments

pytest.importorskip("torch_fidelity", reason="it comes with hla-zoo[eval]")


def rotation(dim, seed):
    return torch.linalg.qr(torch.randn(dim, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))[0]


def gaussian(mean, covariance):
    return Gaussian(torch.as_tensor(mean).double(), covariance.double(), None)


@pytest.mark.parametrize(("low", "tolerance"), [(0.1, 1e-12), (0.0, 1e-6)], ids=["regular", "singular"])
def test_frechet_distance_of_commuting_gaussians_has_a_closed_form(low, tolerance):
    a, b = torch.tensor([1.0, 2, 3, 4, low]).double(), torch.tensor([4.0, 2, low, 1, 9]).double()
    turn = rotation(5, 0)
    means = torch.zeros(5).double(), torch.tensor([1.0, 0, 0, 2, 0]).double()
    found = frechet_distance(gaussian(means[0], turn @ a.diag() @ turn.T), gaussian(means[1], turn @ b.diag() @ turn.T))
    assert found == pytest.approx(float(5 + (a.sqrt() - b.sqrt()).square().sum()), abs=tolerance * 19)


def test_frechet_distance_of_two_dimensions_has_a_closed_form():
    """tr (AB)^1/2 = sqrt(tr(AB) + 2 sqrt(det(AB))) for 2 x 2 matrices, which need not commute."""
    a, b = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), torch.tensor([[1.0, -0.7], [-0.7, 3.0]]).double()
    root = (torch.trace(a @ b) + 2 * (a.det() * b.det()).sqrt()).sqrt()
    expected = float(a.trace() + b.trace() - 2 * root)
    zero = torch.zeros(2)
    assert frechet_distance(gaussian(zero, a), gaussian(zero, b)) == pytest.approx(expected, abs=1e-12)
    assert frechet_distance(gaussian(zero, b), gaussian(zero, a)) == pytest.approx(expected, abs=1e-12)
    assert frechet_distance(gaussian(zero, a), gaussian(zero, a)) == pytest.approx(0, abs=1e-12)


def test_features_of_two_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"2 and 3 dimensions"):
        frechet_distance(gaussian(torch.zeros(2), torch.eye(2)), gaussian(torch.zeros(3), torch.eye(3)))


def test_moments_are_exact_far_from_zero():
    rng = np.random.default_rng(0)
    x = 1e6 + rng.normal(size=(1001, 4))
    moments = Moments(4)
    for part in np.array_split(x, 7):
        moments.update(torch.from_numpy(part))
    found = moments.gaussian()
    assert np.allclose(found.covariance, np.cov(x, rowvar=False), rtol=1e-9, atol=1e-9)  # a difference of sums: 1e-4
    assert np.allclose(found.mean, x.mean(0), rtol=1e-14)


def test_extrapolation_removes_the_bias_of_few_samples():
    """Between N(0, I) and N(m, I) the distance is |m|^2; of n samples it is larger by about c/n."""
    dim, shift = 24, 0.1
    rng = np.random.default_rng(1)
    samples = torch.from_numpy(rng.normal(size=(600, dim)) + shift)
    reference, truth = gaussian(torch.zeros(dim), torch.eye(dim)), dim * shift**2
    line = extrapolate(samples, reference)
    assert line.sizes[0] == 300 and line.sizes[-1] == 600
    biased = line.distances[-1]
    assert biased > 1.5 * truth and abs(line.limit - truth) < 0.35 * (biased - truth)
    assert extrapolate(samples[:28], reference) is None


def test_kid_is_the_unbiased_mmd():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(40, 3)), rng.normal(size=(40, 3)) + 0.5
    kernel = lambda a, b: (a @ b / 3 + 1) ** 3  # noqa: E731
    same = [sum(kernel(a, b) for i, a in enumerate(z) for j, b in enumerate(z) if i != j) / (40 * 39) for z in (x, y)]
    cross = np.mean([[kernel(a, b) for b in y] for a in x])
    found = kernel_distance(torch.from_numpy(x), torch.from_numpy(y))
    assert found["kid"] == pytest.approx(sum(same) - 2 * cross, rel=1e-9)  # one subset of everything, 100 times
    assert found["subset_size"] == 40 and found["kid_std"] < 1e-12


def test_precision_and_recall_follow_their_definition():
    rng = np.random.default_rng(3)
    samples, reference = rng.normal(size=(60, 4)) * 0.5, rng.normal(size=(70, 4))

    def inside(points, centres):
        radii = [np.sort(np.linalg.norm(centres - c, axis=1))[3] for c in centres]  # the first is itself
        return np.mean([any(np.linalg.norm(p - c) <= r for c, r in zip(centres, radii, strict=True)) for p in points])

    found = precision_recall(torch.from_numpy(samples), torch.from_numpy(reference), batch=16)
    assert found["precision"] == pytest.approx(inside(samples, reference))
    assert found["recall"] == pytest.approx(inside(reference, samples))
    assert found["precision"] > 0.9 > found["recall"] > 0


def test_inception_score_of_sure_and_of_unsure_predictions():
    sure = 100 * torch.nn.functional.one_hot(torch.arange(5000) % 5).double()
    assert inception_score(sure)["inception_score"] == pytest.approx(5, rel=5e-3)  # splits are not exactly balanced
    assert inception_score(0 * sure)["inception_score"] == pytest.approx(1)


class Images(torch.utils.data.Dataset):
    """What torch-fidelity reads: uint8 images by number."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        return self.images[number]


def test_equal_to_torch_fidelity_and_torchmetrics_on_the_same_features():
    fidelity = pytest.importorskip("torch_fidelity")
    metrics = pytest.importorskip("torchmetrics.image.fid")
    from torch_fidelity.feature_extractor_base import FeatureExtractorBase

    one, other = noise_images(300, 0), noise_images(280, 1, spread=90)
    network = SmallNetwork()
    prepare = lambda x: (x.float() / 255 - 0.5) / 0.5  # noqa: E731

    class Theirs(FeatureExtractorBase):
        def __init__(self, name, features_list, **kwargs):
            super().__init__(name, features_list)
            self.network = network

        def forward(self, x):
            found = dict(zip(("features", "logits"), self.network(prepare(x)), strict=True))
            return tuple(found[name].float() for name in self.features_list)

        @staticmethod
        def get_provided_features_list():
            return "features", "logits"

        @staticmethod
        def get_default_feature_layer_for_metric(metric):
            return "logits" if metric == "isc" else "features"

        @staticmethod
        def can_be_compiled():
            return False

    fidelity.register_feature_extractor("theirs", Theirs)
    theirs = fidelity.calculate_metrics(
        input1=Images(one),
        input2=Images(other),
        feature_extractor="theirs",
        **dict.fromkeys(("fid", "isc", "kid", "prc"), True),
        kid_subset_size=280,
        cuda=False,
        cache=False,
        verbose=False,
    )

    class Module(torch.nn.Module):
        num_features = DIM

        def forward(self, x):
            return network(prepare(x))[0].float()

    metric = metrics.FrechetInceptionDistance(feature=Module())
    metric.update(one, real=False)
    metric.update(other, real=True)
    with pytest.warns(UserWarning, match="biased upwards"):
        ours = score([one], [other], small_extractor(), FidOptions(workers=0))["scores"]
    assert ours["fid"] == pytest.approx(theirs["frechet_inception_distance"], rel=1e-6)
    assert ours["fid"] == pytest.approx(float(metric.compute()), rel=1e-4)  # theirs is float32
    assert ours["kid"] == pytest.approx(theirs["kernel_inception_distance_mean"], rel=1e-3)  # float32
    assert ours["inception_score"] == pytest.approx(theirs["inception_score_mean"], rel=1e-6)
    assert (ours["precision"], ours["recall"]) == pytest.approx((theirs["precision"], theirs["recall"]), abs=0.005)
    assert ours["fid"] > 0 and ours["recall"] < 1
