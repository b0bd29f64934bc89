"""Features of GPS++: chemistry of atoms and bonds, shortest paths, walks and eigenvectors."""

from bevatron.models.gpspp.features.featurizer import Featurizer, featurize

__all__ = ["Featurizer", "featurize"]
