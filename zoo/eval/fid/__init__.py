"""Scores of generated images: Frechet distances, KID, Inception score, precision and recall."""

from zoo.eval.fid.evaluate import reference_statistics, score
from zoo.eval.fid.extractors import Extractor, Inception, ModuleExtractor, open_extractor
from zoo.eval.fid.settings import FidOptions
from zoo.eval.fid.statistics import Moments, Statistics, load_statistics

__all__ = [
    "Extractor",
    "FidOptions",
    "Inception",
    "ModuleExtractor",
    "Moments",
    "Statistics",
    "load_statistics",
    "open_extractor",
    "reference_statistics",
    "score",
]
