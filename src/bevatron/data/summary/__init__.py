"""Statistics of data sets."""
