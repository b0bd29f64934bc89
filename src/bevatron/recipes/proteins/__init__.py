"""What the systems of proteins share: stores and their preparation, runs in stages, pages."""
