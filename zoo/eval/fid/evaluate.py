"""Scoring of generated images against a reference, with metadata of the scores."""

import json
import warnings
from dataclasses import asdict
from pathlib import Path

from zoo.config import Tree
from zoo.eval.fid.extractors import INCEPTION, Extractor
from zoo.eval.fid.features import Extracted, extract_features, rank_and_world
from zoo.eval.fid.images import Place, open_image_set
from zoo.eval.fid.scores import (
    extrapolate,
    frechet_distance,
    inception_score,
    kernel_distance,
    precision_recall,
    require_torch_fidelity,
)
from zoo.eval.fid.settings import FidOptions
from zoo.eval.fid.statistics import Statistics, array_names, holds_statistics, load_statistics
from zoo.io import environment

MIN_SAMPLES = 10_000  # number of images below which the bias of the Frechet distance is large
REFERENCE_FEATURES = 10_000  # number of reference images (fixed random subset) for KID, precision and recall
VALUES = ("kid", "kid_std", "precision", "recall", "inception_score", "inception_score_std")


def score(
    samples: Place, reference: Place | Statistics, extractor: Extractor, options: FidOptions | None = None
) -> Tree:
    """Compute all scores of `samples` against `reference` that the extractor and the reference allow.

    samples: a path (folder, .npz, .parquet), or an iterable of the uint8 batches [B, 3, H, W] of this process.
    reference: images likewise, a statistics file, or `Statistics`.

    Returns the scores with metadata, the same in every process. Raises ValueError for different image sizes or
    extractors, and if there are not more images than features.
    """
    options = options or FidOptions()
    require_torch_fidelity()
    if isinstance(reference, Statistics):
        known = reference
        if known.extractor:
            extractor.check(known.extractor, known.images)
    else:  # before the samples, so that a wrong reference fails early
        known = reference_statistics(reference, extractor, options)
    found = _extract(samples, extractor, options)
    _check_sizes(found.statistics, known)
    for name, one in (("samples", found.statistics), ("reference", known)):
        if one.pool.n is not None and one.pool.n <= extractor.identity.dim:
            raise ValueError(
                f"the {name} are {one.pool.n} images, not more than the {extractor.identity.dim} features of the "
                f"extractor: their covariance is singular and the distance means nothing"
            )
    return _metadata(found, known, extractor, options, str(samples) if isinstance(samples, str | Path) else "")


def reference_statistics(where: Place, extractor: Extractor, options: FidOptions | None = None) -> Statistics:
    """Compute the statistics of images, or load them from a statistics file, if possible with the features of
    `REFERENCE_FEATURES` images. Raises ValueError for statistics of another extractor."""
    options = options or FidOptions()
    if not holds_statistics(where):
        found = _extract(where, extractor, options, keep=REFERENCE_FEATURES)
        found.statistics.features = found.features
        return found.statistics
    assert isinstance(where, str | Path)
    known = load_statistics(where)
    if known.extractor:
        extractor.check(known.extractor, str(where))
        return known
    if extractor.identity.name != INCEPTION or len(known.pool.mean) != extractor.identity.dim:
        raise ValueError(
            f"{where} holds statistics of another extractor: an .npz with mu and sigma is read as statistics of "
            f"Inception with 2048 features; it has {len(known.pool.mean)}, and the extractor here is "
            f"{extractor.identity.name!r}"
        )
    if "arr_0" not in array_names(where):
        known.warnings.append(f"{where} holds mu and sigma, but no images: no KID, precision and recall")
        return known
    shown = _extract(where, extractor, options, keep=REFERENCE_FEATURES)
    known.features, known.image_size = shown.features, shown.statistics.image_size
    return known


def _extract(where: Place, extractor: Extractor, options: FidOptions, keep: int | None = None) -> Extracted:
    images = open_image_set(where, options.image_size, options.image_key, options.workers)
    crop = f"ADM centre crop to {options.image_size}" if options.image_size else "none"
    return extract_features(images, extractor, options.batch_size, options.device, keep, crop)


def _check_sizes(samples: Statistics, reference: Statistics) -> None:
    if reference.image_size and samples.image_size != reference.image_size:
        one, other = ("{1} x {0}".format(*s.image_size) for s in (samples, reference))
        raise ValueError(
            f"the images of {samples.images} have {one} pixels, the images of {reference.images} {other}: "
            "a score needs the same size on both sides (see fid.image_size)"
        )


def _metadata(found: Extracted, reference: Statistics, extractor: Extractor, options: FidOptions, path: str) -> Tree:
    samples = found.statistics
    notes = list(reference.warnings)
    counts = {"samples": samples.pool.n, "reference": reference.pool.n}
    scores: dict[str, float | None] = {"fid": frechet_distance(samples.pool, reference.pool)}
    line = extrapolate(found.features, reference.pool)
    details: Tree = {"extrapolation": asdict(line) if line else None}
    few = {name: n for name, n in counts.items() if n is not None and n < MIN_SAMPLES}
    if few:
        limit = f"the 1/n extrapolation in the samples is {line.limit:.4f}" if line else "too few for the extrapolation"
        what = " and ".join(f"{n} images of the {name}" for name, n in few.items())
        biased = "the distance is biased upwards and comparable only at equal n"
        notes.append(f"{what}: under {MIN_SAMPLES}, {biased}; {limit}")
    scores["sfid"] = None
    if samples.spatial and reference.spatial:
        scores["sfid"] = frechet_distance(samples.spatial, reference.spatial)
    if reference.features is not None:
        ours, theirs = (x.to(options.device or "cpu") for x in (found.features, reference.features))
        details["kid"] = kernel_distance(ours, theirs)
        details["precision_recall"] = precision_recall(ours, theirs)
    if found.logits is not None:
        details["inception_score"] = inception_score(found.logits)
    for name in ("kid", "precision_recall", "inception_score"):
        one = details.get(name, {})
        scores |= {k: one.pop(k) for k in VALUES if k in one}
    for note in notes if rank_and_world()[0] == 0 else []:
        warnings.warn(note, stacklevel=3)
    about = {key: _describe(one) for key, one in (("samples", samples), ("reference", reference))}
    about["samples"]["card"] = _sample_metadata(path)
    precision = {"features": "float32 without TF32", "statistics": "float64"}
    return {
        "scores": scores,
        "details": details,
        **about,
        "extractor": asdict(extractor.identity),
        "precision": precision,
        "warnings": notes,
        **environment(),
    }


def _describe(one: Statistics) -> Tree:
    kept = None if one.features is None else len(one.features)
    return {
        "images": one.images,
        "statistics": one.file or None,
        "n": one.pool.n,
        "image_size": one.image_size or None,
        "crop": one.crop,
        "features_for_kid_and_recall": kept,
    }


def _sample_metadata(path: str) -> Tree | None:
    """Return the metadata that `zoo sample` wrote next to the images; None if there are none."""
    file = Path(f"{path}.json")
    return json.loads(file.read_text()) if path and file.is_file() else None
