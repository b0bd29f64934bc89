"""GPS++: molecular property prediction (Masters et al. 2023)."""

from bevatron.models.gpspp.features import Featurizer, featurize

__all__ = ["Featurizer", "featurize"]
