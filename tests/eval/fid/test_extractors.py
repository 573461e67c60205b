"""Extractors: Inception against torch-fidelity and torchmetrics on one random weights file, timm, run folders."""

from dataclasses import asdict

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.helpers.runs import tiny
from tests.helpers.small_images import noise_images, small_extractor
from zoo.eval.fid import Inception, ModuleExtractor, open_extractor
from zoo.eval.fid.extractors import timm_extractor
from zoo.io import weights_hash
from zoo.train.classification import ClassificationRun

N = 2  # images; the network is large


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory):
    """Random weights of the FID network, scaled so that its features differ between images."""
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        loading = module.FeatureExtractorInceptionV3.load_state_dict
        module.FeatureExtractorInceptionV3.load_state_dict = lambda self, state: None  # fresh weights
        file = tmp_path_factory.mktemp("inception") / "weights.pth"
        torch.save({}, file)
        try:
            network = module.FeatureExtractorInceptionV3("x", ["2048"], str(file))
        finally:
            module.FeatureExtractorInceptionV3.load_state_dict = loading
        for part in network.modules():
            if isinstance(part, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(part.weight)
    torch.save(network.state_dict(), file)
    return file


def test_inception_equals_torch_fidelity_and_torchmetrics_on_one_weights_file(inception_file):
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    metrics = pytest.importorskip("torchmetrics.image.fid")
    images = noise_images(N, 0, size=32)
    ours = Inception(str(inception_file))
    with torch.no_grad():
        found = ours(images)
    theirs = module.FeatureExtractorInceptionV3("x", ["2048", "logits_unbiased"], str(inception_file))
    blocks = {}
    theirs.Mixed_6d.register_forward_hook(lambda m, i, output: blocks.update(spatial=output))
    pool, logits = theirs(images)
    assert torch.equal(found.pool, pool) and torch.equal(found.logits, logits)
    assert found.spatial.shape == (N, 2023)  # 17 x 17 places, the first 7 channels of mixed_6
    by_place = found.spatial.reshape(N, 17, 17, 7)
    assert torch.equal(by_place[:, 3, 5], blocks["spatial"][:, :7, 3, 5])
    assert len({tuple(row.tolist()) for row in pool}) == N, "the features tell the images apart"

    metric = metrics.FrechetInceptionDistance(
        feature=2048, feature_extractor_weights_path=str(inception_file), antialias=False
    )
    assert torch.allclose(metric.inception(images), pool, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(metrics.NoTrainInceptionV3("x", ["2048"], str(inception_file))(images), pool, rtol=1e-2)


def test_inception_reads_safetensors_and_refuses_other_files(inception_file, tmp_path):
    weights = torch.load(inception_file, weights_only=True)
    save_file(weights, tmp_path / "inception.safetensors")
    one, other = Inception(str(inception_file)), Inception(str(tmp_path / "inception.safetensors"))
    assert one.identity == other.identity and one.identity.dim == 2048
    save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "broken.pth").write_bytes(b"not weights")
    for file, sentence in [
        (tmp_path / "other.safetensors", "does not hold the weights of the FID Inception"),
        (tmp_path / "broken.pth", "cannot be read"),
        (tmp_path / "none.pth", "there is no weights file"),
    ]:
        with pytest.raises(ValueError, match=sentence) as caught:
            Inception(str(file))
        assert "\n" not in str(caught.value)


def test_pickled_code_in_a_weights_file_is_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    torch.save({"Conv2d_1a_3x3.conv.weight": Bomb()}, tmp_path / "bomb.pth")
    with pytest.raises(ValueError, match="cannot be read"):
        Inception(str(tmp_path / "bomb.pth"))
    assert not (tmp_path / "ran").exists()


def test_dinov2_of_timm_with_a_weights_file(tmp_path):
    network = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=224, depth=1)
    full = timm.create_model("vit_small_patch14_dinov2", num_classes=0)  # 518 pixels, as published
    save_file(full.state_dict(), tmp_path / "dino.safetensors")
    found = timm_extractor("vit_small_patch14_dinov2", str(tmp_path / "dino.safetensors"))
    assert found.identity.resize == "bicubic antialiased to 224 x 224" and found.identity.dim == 384
    assert found.identity.mean == pytest.approx([0.485, 0.456, 0.406])
    images = noise_images(2, 0, size=224)
    x = (images / 255 - torch.tensor(found.identity.mean)[:, None, None]) / torch.tensor(found.identity.std)[
        :, None, None
    ]
    with torch.no_grad():
        assert torch.allclose(found(images).pool, found.network.forward_features(x)[:, 0], atol=1e-5)  # class token
    assert network.num_features == 384
    assert torch.equal(found.network.blocks[11].mlp.fc2.weight, full.blocks[11].mlp.fc2.weight)


def test_a_trained_classifier_gives_its_last_features_and_logits(tmp_path):
    trainer = ClassificationRun(tiny(tmp_path / "run"))
    trainer.train()
    found = open_extractor(str(tmp_path / "run"))
    images = noise_images(5, 0)
    with torch.no_grad():
        features = found(images)
        head = found.network.head(features.pool)
    assert features.pool.shape == (5, 16) and torch.allclose(features.logits, head, atol=1e-6)
    assert asdict(found.identity)["resize"].endswith("8 x 8")


def test_the_hash_is_that_of_the_weights():
    a, b = small_extractor(0), small_extractor(0)
    assert a.identity == b.identity and a.identity != small_extractor(1).identity
    with torch.no_grad():
        b.network.head[0, 0] += 1e-6
    assert weights_hash(a.network) != weights_hash(b.network)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("inception", "needs fid.weights=FILE"),
        ("inceptoin", "unknown extractor .* Did you mean 'inception'"),
        ("vit_large_patch14_dinvo2", "Did you mean 'vit_large_patch14_dinov2'"),
    ],
)
def test_unknown_extractors(name, sentence):
    with pytest.raises(ValueError, match=sentence):
        open_extractor(name)


def test_weights_for_an_extractor_that_has_its_own(tmp_path):
    with pytest.raises(ValueError, match=r"has its own weights; leave out fid\.weights=a\.pth"):
        open_extractor(str(tmp_path), "a.pth")


def test_networks_that_are_no_extractors():
    with pytest.raises(ValueError, match=r"must return features \[B, D\] for 2 images, got \[2, 3, 32, 32\]"):
        ModuleExtractor(torch.nn.Identity(), "identity")
