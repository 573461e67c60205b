"""Images of diffusion models, and their scores: Frechet distances, KID, Inception score, precision and recall."""

from zoo.eval.generation.evaluate import reference_statistics, score
from zoo.eval.generation.extractors import Extractor, Inception, ModuleExtractor, open_extractor
from zoo.eval.generation.settings import FidOptions
from zoo.eval.generation.statistics import Moments, Statistics, load_statistics

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
