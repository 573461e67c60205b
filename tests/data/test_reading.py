"""Images as they are met with: damaged files, other formats, deep or lying pixels, links, shards that are no shards."""

import gzip
import io
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from zoo.data import InputSpec, LoadedImages, open_source
from zoo.data.decoding import Unreadable, decode
from zoo.data.loader import Loader
from zoo.data.settings import AugmentSettings
from zoo.diffusion.video_samplers import _pixels
from zoo.eval.fid.images import open_image_set

SPEC = InputSpec(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0)


def encoded(level=7, **options):
    buffer = io.BytesIO()
    Image.fromarray(np.full((9, 9, 3), level, np.uint8)).save(buffer, options.pop("format", "PNG"), **options)
    return buffer.getvalue()


def one_sentence(error):
    text = str(error.value)
    return "\n" not in text and "Traceback" not in text


# Damaged files


@pytest.mark.parametrize("workers", [0, 1])
def test_a_set_of_broken_images_is_one_sentence_with_the_file(make_folder, workers):
    root = make_folder({"a": 2, "b": 2})
    for file in root.rglob("*.png"):
        file.write_bytes(file.read_bytes()[:60])
    images = LoadedImages(
        open_source("folder", str(root), True), SPEC, AugmentSettings(), 0, torch.device("cpu"), workers
    )
    with pytest.raises(ValueError, match=r"not one of the 4 images .* b/001\.png: ") as error:
        list(images.evaluation(2))
    assert one_sentence(error)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_image_to_score_is_one_sentence_with_the_file(make_folder, workers):
    root = make_folder({"a": 3})
    file = root / "a" / "001.png"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"001\.png cannot be read: ") as error:
        list(open_image_set(root, workers=workers).batches(2, 0, 1))
    assert one_sentence(error)


def test_a_broken_first_frame_is_one_sentence_with_the_file(tmp_path):
    (tmp_path / "0.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"0\.png cannot be read: it is no image of a known format"):
        _pixels(tmp_path / "0.png")


class Missing:
    def __getitem__(self, key):
        return Path(f"/nowhere/{key}").read_bytes()


def test_errors_of_the_file_system_keep_their_file():
    with pytest.raises(FileNotFoundError) as error:
        list(Loader(Missing(), [[3]], workers=1))
    assert error.value.filename == "/nowhere/3"


def shard(path, *members):
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path.read_bytes()


SAMPLES = [(f"{i}.{end}", data) for i in range(6) for end, data in (("png", encoded(i)), ("cls", b"%d" % i))]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda whole: whole[:3000], r"bad\.tar cannot be read as webdataset: .*truncated"),
        (lambda whole: whole[:3072], r"bad\.tar cannot be read as webdataset: .*truncated"),  # before a header
        (lambda whole: gzip.compress(whole)[:-400], r"bad\.tar cannot be read as webdataset: .*ended"),
        (lambda whole: b"", r"bad\.tar cannot be read as webdataset: .*empty"),
        (lambda whole: b"<html>gone</html>" * 99, r"bad\.tar cannot be read as webdataset: "),
        (lambda whole: bytes(10240), r"bad\.tar cannot be read as webdataset: it holds nothing"),
    ],
)
@pytest.mark.parametrize("beside", ["", "good,"])
def test_damaged_shards_are_one_sentence_with_the_file(tmp_path, damage, sentence, beside):
    pytest.importorskip("datasets")
    whole = shard(tmp_path / "good.tar", *SAMPLES)
    (tmp_path / "bad.tar").write_bytes(damage(whole))
    with pytest.raises(ValueError, match=sentence) as error:
        open_source("webdataset", str(tmp_path / f"{{{beside}bad}}.tar"), True, "png", "cls")
    assert one_sentence(error) and "good" not in str(error.value)


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ([("0.png", encoded()), ("0.cls", b"dog")], r"bad\.tar cannot be read as webdataset: invalid literal"),
        ([("0.png", encoded()), ("0.cls", b"1"), ("1.png", encoded())], r"bad\.tar cannot be read as webdataset: "),
        ([("0.jpg", encoded()), ("0.cls", b"1")], r"bad\.tar has no column 'png'; its columns are .*jpg"),
    ],
)
def test_shards_of_other_things_are_one_sentence(tmp_path, members, sentence):
    pytest.importorskip("datasets")
    shard(tmp_path / "bad.tar", *members)
    with pytest.raises(ValueError, match=sentence) as error:
        open_source("webdataset", str(tmp_path / "bad.tar"), True, "png", "cls")
    assert one_sentence(error)


def test_too_many_shards_are_refused_at_once():
    with pytest.raises(ValueError, match=r"names more than 1000000 files"):
        open_source("webdataset", "shard-{0..999999999}.tar", True)


def test_compressed_shards_are_read(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(shard(tmp_path / "a.tar", *SAMPLES)))
    assert len(open_source("webdataset", str(tmp_path / "a.tar.gz"), True, "png", "cls")) == 6


def test_rows_without_an_image_have_a_name_and_are_unreadable(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image": [*IMAGES, None], "label": [0, 1, 1]}), tmp_path / "x.parquet")
    source = open_source("parquet", str(tmp_path / "x.parquet"), train=True)
    assert source.name(2) == "2"
    with pytest.raises(Unreadable, match="holds no image"):
        source.read(2)


IMAGES = [{"bytes": encoded(), "path": None}] * 2


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"image": [1, 2], "label": [0, 1]}, r"the column 'image' of .*x\.parquet holds .*int64.*, not images"),
        ({"image": IMAGES, "label": [0, 10**12]}, r"must hold class numbers from 0 to 999999, got 1000000000000"),
        ({"image": IMAGES, "label": [-1, 1]}, r"must hold class numbers from 0 to 999999, got -1"),
        ({"image": IMAGES, "label": [None, 1]}, r"must hold class numbers from 0, but 1 of its 2 rows are empty"),
        ({"image": IMAGES, "label": ["0", "1"]}, r"must hold class numbers from 0, got .*string"),
        ({"image": IMAGES, "label": [[0], [1, 2]]}, r"must hold class numbers from 0, got .*int64"),
        ({"image": [], "label": []}, r"x\.parquet cannot be read as parquet: it holds nothing"),
    ],
)
def test_columns_of_other_things_are_one_sentence(tmp_path, columns, sentence):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=sentence) as error:
        open_source("parquet", str(tmp_path / "x.parquet"), train=True)
    assert one_sentence(error)
    (tmp_path / "x.parquet").write_bytes((tmp_path / "x.parquet").read_bytes()[:-9])
    for opened in (lambda f: open_source("parquet", f, train=True), open_image_set):
        with pytest.raises(ValueError, match=r"x\.parquet cannot be read as parquet: ") as error:
            opened(str(tmp_path / "x.parquet"))
        assert one_sentence(error)


# Pixels


def saved(array, ending, tmp_path, **options):
    Image.fromarray(array).save(tmp_path / f"x.{ending}", **options)
    return decode(str(tmp_path / f"x.{ending}"))


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_grey_levels_of_16_bits_are_scaled(tmp_path, ending):
    ramp = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    found = np.asarray(saved(ramp, ending, tmp_path), np.float64)
    assert found.shape == (64, 64, 3)
    assert np.abs(found[..., 1] - ramp / 257).max() <= 0.5 + 1e-9  # rounded to the nearest level


def test_floats_are_scaled_from_0_to_1_and_refused_beyond(tmp_path):
    ramp = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    assert np.array_equal(np.asarray(saved(ramp, "tif", tmp_path))[..., 0].ravel(), np.arange(256))
    for wrong in (ramp * 255, ramp - 0.5, ramp * np.nan):
        with pytest.raises(Unreadable, match="floats from 0 to 1"):
            saved(wrong, "tif", tmp_path)
    with pytest.raises(Unreadable, match="32-bit integers"):
        saved((ramp * 1e6).astype(np.int32), "tif", tmp_path)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("ending", ["jpg", "png", "tif"])
def test_pictures_are_turned_as_their_exif_says(tmp_path, orientation, ending):
    """The EXIF standard says where the first row and the first column of what is stored lie in what is shown."""
    row = ("top", "top", "bottom", "bottom", "left", "right", "right", "left")[orientation - 1]
    column = ("left", "right", "right", "left", "top", "top", "bottom", "bottom")[orientation - 1]
    shown = np.zeros((16, 24), np.uint8)
    shown[:8, :8] = 255
    lying = shown.T if orientation >= 5 else shown
    lying = lying[::-1] if row in ("bottom", "right") else lying
    lying = lying[:, ::-1] if column in ("bottom", "right") else lying
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = saved(np.ascontiguousarray(lying), ending, tmp_path, exif=exif)
    assert np.abs(np.asarray(found)[..., 0].astype(int) - shown).max() < 8  # JPEG
    found.save(tmp_path / "again.png")
    assert Image.open(tmp_path / "again.png").size == (24, 16)


def test_a_damaged_exif_block_leaves_the_picture_as_it_lies(tmp_path):
    picture = decode(encoded(100, format="JPEG", exif=b"Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x09broken"))
    assert picture.size == (9, 9) and np.asarray(picture).mean() == pytest.approx(100, abs=1)


# Folders


@pytest.mark.parametrize("ending", ["webp", "gif", "bmp", "tif", "tiff", "ppm", "JPEG", "Png"])
def test_class_folders_of_any_usual_format_are_read(tmp_path, ending):
    for name in ("cat", "dog", "emu"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8), "red").save(tmp_path / name / f"0.{ending if name == 'dog' else 'png'}")
        (tmp_path / name / "notes.txt").write_text("not an image")
    source = open_source("folder", str(tmp_path), train=True)
    assert source.classes == ["cat", "dog", "emu"] and len(source) == 3
    assert source.read(1)[1] == 1 and source.read(1)[0].getpixel((3, 3))[0] > 250


def test_the_order_is_that_of_timm(tmp_path):
    from timm.data.readers import create_reader

    for name in ("n10", "n2", "deep/n3", "N1"):
        (tmp_path / name).mkdir(parents=True)
        for i in (1, 10, 9):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{i}.png")
    os.symlink(tmp_path / "n2", tmp_path / "n4")
    theirs, ours = create_reader("", root=str(tmp_path)), open_source("folder", str(tmp_path), train=True)
    assert [ours.name(i) for i in range(len(ours))] == [theirs.filename(i) for i in range(len(theirs))]
    assert ours.samples == theirs.samples and ours.classes == list(theirs.class_to_idx)


def test_links_back_are_followed_once(make_folder):
    root = make_folder({"a": 3, "b": 2})
    os.symlink("..", root / "a" / "back")
    os.symlink("loop", root / "b" / "loop")
    source = open_source("folder", str(root), train=True)
    assert [source.name(i) for i in range(len(source))] == [
        "a/000.png",
        "a/001.png",
        "a/002.png",
        "b/000.png",
        "b/001.png",
    ]
