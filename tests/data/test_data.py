"""Sources, transforms and batches: what is read, in which order, with which randomness, and what is refused."""

import io
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from tests.helpers.runs import tiny
from zoo.data import BatchPlan, CachedImages, InputSpec, LoadedImages, check_unreadable, open_source, open_sources
from zoo.data.decoding import Unreadable
from zoo.data.settings import AugmentSettings, DataSettings
from zoo.data.transforms import check_cacheable
from zoo.train.classification import ClassificationRun

CPU = torch.device("cpu")
SPEC = InputSpec(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)
AUGMENT = AugmentSettings(crop="resized", color_jitter=0.4, auto_augment="rand-m9-mstd0.5-inc1", random_erase=0.5)


def loaded(source, seed=0, workers=0, augment=AUGMENT):
    return LoadedImages(source, SPEC, augment, seed, CPU, workers)


def pixels(batches):
    return torch.cat([batch.images for batch in batches])


# Readers


def test_image_folder(make_folder):
    source = open_source("folder", str(make_folder({"b": 2, "a": 3})), train=True)
    assert len(source) == 5 and source.classes == ["a", "b"]
    assert [source.read(i)[1] for i in range(5)] == [0, 0, 0, 1, 1]
    assert source.read(0)[0].mode == "RGB" and source.name(3) == "b/000.png"


def encoded(level):
    buffer = io.BytesIO()
    Image.fromarray(np.full((9, 9, 3), level, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def test_parquet(tmp_path, monkeypatch):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    rows = [{"image": {"bytes": encoded(i), "path": f"{i}.png"}, "label": i % 3} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    source = open_source("parquet", str(tmp_path / "train.parquet"), train=True)
    assert len(source) == 6 and len(source.classes) == 3
    assert [source.read(i)[1] for i in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [np.asarray(source.read(i)[0])[0, 0, 0] for i in range(6)] == list(range(6))
    assert source.name(4) == "4.png"
    with pytest.raises(ValueError, match=r"has no column 'picture'; its columns are image, label"):
        open_source("parquet", str(tmp_path / "train.parquet"), train=True, image_key="picture")
    with pytest.raises(ValueError, match=r"there is no parquet file"):
        open_source("parquet", str(tmp_path / "val.parquet"), train=True)
    (tmp_path / "cut.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"cut.parquet cannot be read as parquet: Parquet file size is 4 bytes"):
        open_source("parquet", str(tmp_path / "cut.parquet"), train=True)


def test_webdataset(tmp_path):
    pytest.importorskip("datasets")
    for shard in range(2):
        with tarfile.open(tmp_path / f"shard-{shard}.tar", "w") as tar:
            for i in range(3):
                for ending, data in (("png", encoded(10 * shard + i)), ("cls", str(i).encode())):
                    info = tarfile.TarInfo(f"{shard}{i}.{ending}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    source = open_source("webdataset", str(tmp_path / "shard-*.tar"), train=True, image_key="png", label_key="cls")
    assert len(source) == 6 and len(source.classes) == 3
    found = sorted((int(np.asarray(source.read(i)[0])[0, 0, 0]), source.read(i)[1]) for i in range(6))
    assert found == [(0, 0), (1, 1), (2, 2), (10, 0), (11, 1), (12, 2)]
    for shards in ("shard-{0..1}.tar", "shard-{0,1}.tar"):
        where = str(tmp_path / shards)
        assert len(open_source("webdataset", where, train=True, image_key="png", label_key="cls")) == 6
    with pytest.raises(ValueError, match=r"there is no webdataset file"):
        open_source("webdataset", str(tmp_path / "shard-{7..9}.tar"), train=True)


def test_digits_are_split_once_and_for_all():
    train, val = (open_source("digits", "", train=flag) for flag in (True, False))
    assert (len(train), len(val)) == (1000, 797)
    assert not set(train.indices) & set(val.indices)


# What is refused


def test_empty_and_missing_folders(tmp_path, make_folder):
    with pytest.raises(ValueError, match=r"holds no images"):
        open_source("folder", str(tmp_path), train=True)
    with pytest.raises(ValueError, match=r"there is no image folder"):
        open_source("folder", str(tmp_path / "none"), train=True)
    root = make_folder({"a": 2})
    (root / ".hidden").mkdir()
    open_source("folder", str(root), train=True)
    (root / "b").mkdir()
    with pytest.raises(ValueError, match=r"no image of the class b: delete its sub-folder"):
        open_source("folder", str(root), train=True)
    with pytest.raises(ValueError, match=r"data.val is empty"):
        open_source("folder", "", train=False)


def test_class_counts_must_match(make_folder):
    two, three = str(make_folder({"a": 2, "b": 2})), str(make_folder({"a": 1, "b": 1, "c": 1}))
    with pytest.raises(ValueError, match=r"data.num_classes is 10, but the training set has 2 classes"):
        open_sources(DataSettings(source="folder", train=two, val=two, num_classes=10))
    with pytest.raises(ValueError, match=r"the validation set has 3 classes"):
        open_sources(DataSettings(source="folder", train=two, val=three))


def test_unreadable_images_are_replaced_counted_and_limited(make_folder, tmp_path, capfd):
    root = make_folder({"a": 60, "b": 60})
    broken = root / "a" / "007.png"
    broken.write_bytes(broken.read_bytes()[:60])
    source = open_source("folder", str(root), train=True)
    for images in (loaded(source), CachedImages(source, SPEC, AugmentSettings(crop="none"), 0, CPU, 0)):
        batches = list(images.train(BatchPlan(120, 40, seed=0), 0, 3))
        assert [i for batch in batches for i in batch.unreadable()] == [7]
        evaluation = list(images.evaluation(50))
        assert [i for batch in evaluation for i in batch.unreadable()] == [7]
    data = {"source": "folder", "train": str(root), "val": str(root), "batch_size": 40}
    result = ClassificationRun(tiny(tmp_path / "run", data=data)).train()
    assert result["train_unreadable"] == 1 and result["unreadable"] == 1 and result["images"] == 119
    assert "skipped unreadable images, 1 so far, such as a/007.png" in capfd.readouterr().out
    (root / "b" / "003.png").write_bytes(b"not an image")
    with pytest.raises(ValueError, match=r"2 of 120 images cannot be read; at most 1% may be unreadable"):
        ClassificationRun(tiny(tmp_path / "run2", data=data)).train()
    sound = str(make_folder({"a": 60, "b": 60}))
    with pytest.raises(ValueError, match=r"2 of 120 images cannot be read"):  # in the validation set
        ClassificationRun(tiny(tmp_path / "run3", data={**data, "train": sound})).train()
    check_unreadable(1, 100)


def test_links_to_nothing_and_rows_without_an_image_are_unreadable(make_folder, tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root = make_folder({"a": 3, "b": 3})
    (root / "a" / "001.png").unlink()
    (root / "a" / "001.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.raises(Unreadable):
        open_source("folder", str(root), train=True).read(1)
    table = pa.table({"image": [{"bytes": encoded(3), "path": None}, {"bytes": None, "path": None}], "label": [0, 1]})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(Unreadable):
        open_source("parquet", str(tmp_path / "rows.parquet"), train=True).read(1)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        ((10, 20, 0), "the training set has only 10 images"),
        ((100, 10, 0, 0, 3), "cannot be shared by 3 processes with 1 micro-batches"),
    ],
)
def test_impossible_batches(plan, sentence):
    with pytest.raises(ValueError, match=sentence):
        BatchPlan(*plan)


def test_the_cache_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match=r"switch off augment.auto_augment, augment.random_erase"):
        check_cacheable(DataSettings(cache=True), AugmentSettings(auto_augment="rand-m9", random_erase=0.1))


def test_held_out_images_are_the_last_of_the_training_set():
    whole = open_source("digits", "", train=True)
    for cache in (False, True):
        train, val = open_sources(DataSettings(holdout=300, cache=cache))
        assert (len(train), len(val)) == (700, 300) and val.classes == whole.classes
        assert val.name(0) == whole.name(700) and val.read(5)[1] == whole.read(705)[1]
        assert train.read(699)[1] == whole.read(699)[1]
    with pytest.raises(ValueError, match=r"has only 1000 images"):
        open_sources(DataSettings(holdout=1000))


# Order and randomness


def test_each_epoch_is_a_permutation_and_shares_tile_the_batch():
    whole = BatchPlan(100, 20, seed=3)
    assert sorted(i for step in range(5) for i in whole.step_images(step)[1]) == list(range(100))
    assert whole.step_images(5)[0] == 1 and not np.array_equal(whole.step_images(0)[1], whole.step_images(5)[1])
    parts = [BatchPlan(100, 20, 3, rank, 2, 5) for rank in range(2)]
    keys = [key for plan in parts for part in plan.keys(7, 8) for key in part]
    assert keys == next(iter(whole.keys(7, 8)))


def test_samples_do_not_depend_on_workers_or_where_a_run_began(make_folder):
    source = open_source("folder", str(make_folder({"a": 12, "b": 12})), train=True)
    plan = BatchPlan(24, 8, seed=5)
    here = pixels(loaded(source, 5).train(plan, 0, 6))
    assert torch.equal(here, pixels(loaded(source, 5, workers=2).train(plan, 0, 6)))
    assert torch.equal(here[32:], pixels(loaded(source, 5).train(plan, 4, 6)))
    assert not torch.equal(here, pixels(loaded(source, 6).train(plan, 0, 6)))
    first, second = (
        {i: p for b in loaded(source, 5).train(plan, s, s + 3) for i, p in zip(b.index.tolist(), b.images, strict=True)}
        for s in (0, 3)
    )
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[i], second[i]) for i in first), "each epoch augments anew"


def test_cached_images_do_not_depend_on_processes_and_match_the_loader():
    source = open_source("digits", "", train=True)
    cached = CachedImages(source, SPEC, AugmentSettings(crop="padded", pad=1), 0, CPU, 0)
    whole = pixels(cached.train(BatchPlan(1000, 40, 0), 0, 2))
    shares = [pixels(cached.train(BatchPlan(1000, 40, 0, rank, 2), 0, 2)) for rank in range(2)]
    joined = torch.cat([part[20 * s : 20 * s + 20] for s in range(2) for part in shares])
    assert torch.equal(whole, joined)
    first = next(iter(cached.evaluation(50)))
    same = next(iter(loaded(source).evaluation(50)))
    torch.testing.assert_close(first.images, same.images, atol=1e-6, rtol=0)
    assert torch.equal(first.labels, same.labels)


def test_cached_shift_is_padding_then_cropping():
    source = open_source("digits", "", train=True)
    cached = CachedImages(source, SPEC, AugmentSettings(crop="padded", pad=2, hflip=0.5), 0, CPU, 0)
    index, draws = torch.arange(30), torch.rand(30, 3)
    found = cached.shifted(index, draws)
    padded = torch.nn.functional.pad(cached.images[:30], (2, 2, 2, 2))
    for i in range(30):
        down, right = (int(draws[i, axis] * 5) for axis in (0, 1))
        expected = padded[i, :, down : down + 8, right : right + 8]
        assert torch.equal(found[i], expected.flip(-1) if draws[i, 2] < 0.5 else expected)


def test_cached_resized_crop_is_a_part_of_the_image_resized():
    source = open_source("digits", "", train=True)
    cached = CachedImages(source, SPEC, AugmentSettings(crop="resized", scale=[0.25, 1.0], hflip=0.5), 0, CPU, 0)
    whole = cached.images[:6].float()
    index, middle = (
        torch.arange(6),
        torch.tensor([0.999999, 0.5, 0.5, 0.5, 0.9]).expand(6, 5),
    )  # area, ratio, place, flip
    torch.testing.assert_close(cached.resized(index, middle), whole, atol=1e-3, rtol=1e-3)
    mirrored = middle.clone()
    mirrored[:, 4] = 0.1
    torch.testing.assert_close(cached.resized(index, mirrored), whole.flip(-1), atol=1e-3, rtol=1e-3)
    corner = torch.tensor([0.0, 0.5, 0.0, 1.0, 0.9]).expand(6, 5)  # the upper right quarter
    wanted = torch.nn.functional.interpolate(whole[:, :, :4, 4:], size=(8, 8), mode="bilinear", align_corners=False)
    found = cached.resized(index, corner)
    torch.testing.assert_close(found[:, :, 1:-1, 1:-1], wanted[:, :, 1:-1, 1:-1], atol=1e-3, rtol=1e-3)
    drawn = next(cached.train(BatchPlan(1000, 40, 0), 0, 1)).images
    assert drawn.shape == (40, 3, 8, 8) and drawn.min() >= -1 and drawn.max() <= 1
