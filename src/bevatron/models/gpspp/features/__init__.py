"""Features of GPS++: chemistry of atoms and bonds, shortest paths, walks and eigenvectors."""

from bevatron.models.gpspp.features.featurizer import Featurizer, featurize
from bevatron.models.gpspp.features.keys import canonical, scaffold

__all__ = ["Featurizer", "canonical", "featurize", "scaffold"]
