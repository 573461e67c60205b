"""Sets of images, statistics on disk, processes that share the work, and the evaluation tool."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from tests.forks import finish, start_two
from tests.helpers.runs import tiny
from tests.helpers.small_images import SmallNetwork, noise_images, save_npz, small_extractor
from zoo.data.transforms import center_crop
from zoo.eval.fid import FidOptions, ModuleExtractor, evaluate, load_statistics, reference_statistics, score
from zoo.eval.fid.features import extract_features
from zoo.eval.fid.images import open_image_set
from zoo.train.classification import ClassificationRun

pytest.importorskip("torch_fidelity", reason="it comes with hla-zoo[eval]")

PLAIN = FidOptions(workers=0, batch_size=16)
pytestmark = pytest.mark.filterwarnings("ignore:.*biased upwards.*")


def all_images(where, **options):
    parts = list(open_image_set(where, **options).batches(7, 0, 1))
    assert torch.equal(torch.cat([n for n, _ in parts]), torch.arange(sum(len(n) for n, _ in parts)))
    return torch.cat([images for _, images in parts])


def write_folder(images, root):
    root.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(root / f"{i:04d}.png")
    return str(root)


def write_parquet(folder, file):
    datasets = pytest.importorskip("datasets")
    rows = datasets.load_dataset("imagefolder", data_dir=folder, split="train")
    rows.to_parquet(file)
    return str(file)


def test_every_source_gives_the_same_images_and_the_same_card(tmp_path):
    images, reference = noise_images(40, 0), noise_images(50, 1)
    folder = write_folder(images, tmp_path / "a")
    np.savez_compressed(tmp_path / "packed.npz", arr_0=images.permute(0, 2, 3, 1).numpy(), arr_1=np.arange(40))
    sources = [
        folder,
        save_npz(images, tmp_path / "a.npz"),
        str(tmp_path / "packed.npz"),
        write_parquet(folder, tmp_path / "a.parquet"),
        list(images.split(9)),
    ]
    scores = [score(where, list(reference.split(50)), small_extractor(), PLAIN)["scores"] for where in sources]
    assert scores[0]["fid"] > 0 and all(found.pop("sfid") is None for found in scores)
    for where, found in zip(sources, scores, strict=True):
        assert torch.equal(all_images(where), images)
        assert found == pytest.approx(scores[0], rel=1e-9)


def test_saved_statistics_give_the_same_scores(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "REFERENCE_FEATURES", 30)
    images, reference = noise_images(60, 0), save_npz(noise_images(70, 1), tmp_path / "reference.npz")
    made = reference_statistics(reference, small_extractor(), PLAIN)
    made.save(tmp_path / "stats.safetensors")
    stored = load_statistics(tmp_path / "stats.safetensors")
    assert stored.features.shape == (30, 6) and stored.pool.n == 70 and stored.pool.mean.dtype == torch.float64
    assert stored.extractor["sha256"] == small_extractor().identity.sha256 and stored.extractor["resize"] == "none"
    one, other = (
        score([images], where, small_extractor(), PLAIN)["scores"]
        for where in (reference, str(tmp_path / "stats.safetensors"))
    )
    assert one == other and one["kid"] is not None


class WithPlaces(ModuleExtractor):
    """The small network with two pixels as its spatial features."""

    def forward(self, images):
        return super().forward(images)._replace(spatial=images[:, 0, 2, :2].float())


def test_sfid_is_the_distance_of_the_spatial_features(tmp_path):
    images, reference = noise_images(60, 0), noise_images(70, 1, spread=20)
    extractor = WithPlaces(SmallNetwork(), "places")
    reference_statistics([reference], extractor, PLAIN).save(tmp_path / "stats.safetensors")
    places = [x[:, 0, 2, :2].double().numpy() for x in (images, reference)]
    means, covariances = [p.mean(0) for p in places], [np.cov(p, rowvar=False) for p in places]
    values = np.linalg.eigvals(covariances[0] @ covariances[1])
    expected = ((means[0] - means[1]) ** 2).sum() + np.trace(sum(covariances)) - 2 * np.sqrt(values).sum()
    for where in ([reference], str(tmp_path / "stats.safetensors")):
        assert score([images], where, extractor, PLAIN)["scores"]["sfid"] == pytest.approx(expected, rel=1e-9)
    np.savez(
        tmp_path / "adm.npz",
        mu=np.zeros(6),
        sigma=np.eye(6),
        mu_s=means[1],
        sigma_s=covariances[1],
    )
    named = WithPlaces(SmallNetwork(), "inception")
    assert score([images], str(tmp_path / "adm.npz"), named, PLAIN)["scores"]["sfid"] == pytest.approx(expected)


def test_the_npz_of_adm_is_taken_for_inception_statistics(tmp_path):
    """mu and sigma of many images, and some of the images for KID, precision and recall."""
    reference = noise_images(70, 1)
    known = extract_features(open_image_set([reference]), small_extractor(0, "inception")).statistics
    arrays = {"mu": known.pool.mean.numpy(), "sigma": known.pool.covariance.numpy()}
    np.savez(tmp_path / "few.npz", **arrays)
    np.savez(tmp_path / "all.npz", **arrays, arr_0=reference.permute(0, 2, 3, 1).numpy())
    expected = score([noise_images(60, 0)], [reference], small_extractor(0, "inception"), PLAIN)["scores"]
    cards = [
        score([noise_images(60, 0)], str(tmp_path / f), small_extractor(0, "inception"), PLAIN)
        for f in ("few.npz", "all.npz")
    ]
    assert cards[1]["scores"] == expected and cards[1]["reference"]["n"] is None
    assert cards[0]["scores"]["fid"] == expected["fid"] and "kid" not in cards[0]["scores"]
    assert "no KID" in cards[0]["warnings"][0]


def test_the_image_that_a_score_was_made_for_scores_zero(tmp_path):
    images = noise_images(60, 0)
    found = score([images], [images], small_extractor(), PLAIN)["scores"]
    assert abs(found["fid"]) < 1e-9 and found["precision"] == found["recall"] == 1.0
    worse = [score([noise_images(60, 0, spread=s)], [images], small_extractor(), PLAIN)["scores"] for s in (40, 20, 1)]
    distances = [w["fid"] for w in worse]
    assert 0 < distances[0] < distances[1] < distances[2], "the narrower the variety, the farther"


# One result however the images are dealt out


@pytest.mark.parametrize("size", [3, 16])
def test_batches_change_nothing(size, tmp_path):
    images = save_npz(noise_images(50, 0), tmp_path / "images.npz")
    whole, parts = (extract_features(open_image_set(images), small_extractor(), n, keep=20) for n in (50, size))
    for key in ("mean", "covariance"):
        one, other = getattr(whole.statistics.pool, key), getattr(parts.statistics.pool, key)
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert torch.equal(parts.features, whole.features) and len(whole.features) == 20


def test_shares_of_processes_are_batches_of_the_whole(tmp_path):
    images = open_image_set(save_npz(noise_images(50, 0), tmp_path / "images.npz"))
    alone = list(images.batches(7, 0, 1))
    for rank in range(3):
        for one, other in zip(images.batches(7, rank, 3), alone[rank::3], strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


# Bad input


@pytest.mark.parametrize("mu", [np.full(3, np.nan), np.array("x"), np.zeros(3, complex)])
def test_statistics_are_finite_numbers(mu, tmp_path):
    np.savez(tmp_path / "a.npz", mu=mu, sigma=np.eye(3))
    with pytest.raises(ValueError, match=r"the array mu of .*a\.npz must hold finite numbers"):
        load_statistics(tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"arr_0": np.zeros((4, 8, 8, 3), np.float32)}, r"must be uint8 \[N, H, W, 3\], got float32 \[4, 8, 8, 3\]"),
        ({"arr_0": np.zeros((4, 3, 8, 8), np.uint8)}, r"must be uint8 \[N, H, W, 3\], got uint8 \[4, 3, 8, 8\]"),
        ({"arr_0": np.zeros((2, 5, 8, 8, 3), np.uint8)}, r"holds videos, \[2, 5, 8, 8, 3\]; images are"),
        ({"images": np.zeros((4, 8, 8, 3), np.uint8)}, r"expected the array arr_0, found images"),
    ],
)
def test_npz_of_another_layout(content, sentence, tmp_path):
    np.savez(tmp_path / "x.npz", **content)
    with pytest.raises(ValueError, match=sentence) as caught:
        open_image_set(str(tmp_path / "x.npz"))
    assert "\n" not in str(caught.value)


def test_truncated_npz(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"not a readable \.npz"):
        open_image_set(str(tmp_path / "x.npz"))


def test_what_cannot_be_read_as_images(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.mp4").touch()
    (tmp_path / "empty").mkdir()
    for where, sentence in [
        (str(tmp_path / "a.mp4"), "is a video, but images are scored here"),
        (str(tmp_path / "clips"), "holds videos, but images are scored here"),
        (str(tmp_path / "empty"), "holds no images"),
        (str(tmp_path / "none.parquet"), "there is no parquet file"),
        (str(tmp_path / "none"), "expected an existing folder"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            open_image_set(where)
    for batch, sentence in [
        (torch.zeros(2, 3, 4, 8, 8, dtype=torch.uint8), r"yields videos"),
        (torch.zeros(2, 3, 8, 8), r"must yield uint8 batches \[B, 3, H, W\], got float32 \[2, 3, 8, 8\]"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            score([batch], [noise_images(20, 0)], small_extractor(), PLAIN)


def test_images_of_several_sizes_and_their_crop(tmp_path):
    folder = tmp_path / "images"
    write_folder(noise_images(2, 0), folder)
    Image.new("RGB", (40, 20), (10, 200, 30)).save(folder / "wide.png")
    with pytest.raises(ValueError, match=r"several sizes \(8 x 8 and 40 x 20 pixels\); give one with image_size"):
        all_images(str(folder))
    assert all_images(str(folder), image_size=6).shape == (3, 3, 6, 6)
    assert center_crop(Image.new("RGB", (40, 20), (10, 200, 30)), 6).getpixel((0, 0)) == (10, 200, 30)
    halves = Image.fromarray(np.repeat(np.arange(16, dtype=np.uint8)[None].repeat(4, 0)[..., None], 3, 2))
    assert np.asarray(center_crop(halves, 2))[0, :, 0].tolist() == [7, 9]  # boxes of two columns, then the middle


def test_a_broken_image_is_named(tmp_path):
    folder = write_folder(noise_images(3, 0), tmp_path / "images")
    (tmp_path / "images" / "0001.png").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"0001\.png cannot be read: it is no image"):
        all_images(folder)


def test_what_cannot_be_compared(tmp_path):
    images = noise_images(40, 0)
    reference_statistics([images], small_extractor(), PLAIN).save(tmp_path / "stats.safetensors")
    stats = str(tmp_path / "stats.safetensors")
    save_file({"x": torch.zeros(1)}, tmp_path / "other.safetensors")
    np.savez(tmp_path / "adm.npz", mu=np.zeros(2048), sigma=np.eye(2048))
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "stats.safetensors").read_bytes()[:200])
    for samples, reference, extractor, sentence in [
        ([images], stats, small_extractor(1), r"statistics of another extractor: sha256 is \w{12}\.\.\. there and"),
        ([images], stats, small_extractor(0, "large"), r"another extractor: name is 'small' there and 'large' here"),
        ([images], str(tmp_path / "adm.npz"), small_extractor(), r"another extractor: an .npz with mu and sigma"),
        ([images], str(tmp_path / "other.safetensors"), small_extractor(), r"holds no statistics of images"),
        ([images], str(tmp_path / "cut.safetensors"), small_extractor(), r"truncated or damaged"),
        ([images], str(tmp_path / "none.safetensors"), small_extractor(), r"there is no statistics file"),
        ([images[:6]], stats, small_extractor(), r"the samples are 6 images, not more than the 6 features"),
        ([images], [images[:5]], small_extractor(), r"the reference are 5 images, not more than the 6 features"),
        ([noise_images(20, 0, size=16)], stats, small_extractor(), r"have 16 x 16 pixels, the images of .* 8 x 8"),
    ]:
        with pytest.raises(ValueError, match=sentence) as caught:
            score(samples, reference, extractor, PLAIN)
        assert "\n" not in str(caught.value)


# The tool


@pytest.fixture
def one_thread():
    """As in the processes that the tests start: the features are float32, and their sums depend on the threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_tool_scores_in_two_processes_as_in_one(tmp_path, monkeypatch, one_thread):
    monkeypatch.setattr(sys, "argv", ["evaluate_fid.py"])
    import evaluate_fid

    ClassificationRun(tiny(tmp_path / "run")).train()
    samples, reference = (
        save_npz(noise_images(61, 0), tmp_path / "s.npz"),
        save_npz(noise_images(70, 1), tmp_path / "r.npz"),
    )
    (tmp_path / "s.npz.json").write_text('{"seed": 3}')
    words = [f"fid.extractor={tmp_path}/run", "fid.workers=0", "fid.batch_size=10", "fid.device=cpu"]
    evaluate_fid.main([*words, f"fid.reference={reference}", f"fid.save={tmp_path}/stats.safetensors"])
    words += [f"fid.samples={samples}", f"fid.reference={tmp_path}/stats.safetensors"]
    status, out, err = finish(start_two("tools/evaluate_fid.py", *words))
    assert status == 0, err
    assert out.count("fid: ") == 1 and out.count("wrote ") == 1 and err.count("under 10000") == 1
    card = json.loads((tmp_path / "s.npz.fid.json").read_text())
    alone = evaluate_fid.main(words)
    assert card["scores"].pop("sfid") is alone["scores"].pop("sfid") is None
    assert card["scores"] == pytest.approx(alone["scores"], rel=1e-9)
    assert card["samples"] == alone["samples"] and card["samples"]["card"] == {"seed": 3} and card["samples"]["n"] == 61
    assert card["reference"]["statistics"].endswith("stats.safetensors") and card["reference"]["n"] == 70
    assert card["extractor"]["dim"] == 16 and len(card["extractor"]["sha256"]) == 64
    assert card["details"]["extrapolation"]["sizes"][-1] == 61 and "extrapolation" in card["warnings"][0]
    assert card["command"].startswith("zoo fid ") and card["versions"]["torch"] == torch.__version__.split("+")[0]
    assert {"date", "hardware", "precision", "details"} <= card.keys()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "say what to compare"),
        (["fid.samples=a"], "say what to compare"),
        (["fid.reference=a", "fid.save=a.npz"], "fid.save must name a .safetensors file"),
        (["fid.reference=a.safetensors", "fid.save=b.safetensors"], "holds statistics already"),
        (["fid.sample=a"], "Did you mean 'fid.samples'"),
    ],
)
def test_words_that_the_tool_refuses(words, sentence):
    import evaluate_fid

    with pytest.raises(ValueError, match=sentence):
        evaluate_fid.main(words)


def test_help(capsys):
    import evaluate_fid

    evaluate_fid.main(["--help"])
    text = capsys.readouterr().out
    assert "usage: " in text and "fid.batch_size (int, default 64)" in text


def test_the_embedded_digits_are_a_set_of_images():
    from zoo.data import open_source

    (numbers, images), *rest = open_image_set("digits").batches(800, 0, 1)
    source = open_source("digits", "", train=False)
    assert not rest and len(images) == len(source) == 797 and numbers.tolist() == list(range(797))
    assert torch.equal(images[5], torch.from_numpy(np.array(source.read(5)[0])).permute(2, 0, 1))
    assert [len(batch) for batch, _ in open_image_set("digits").batches(400, 1, 2)] == [397]
