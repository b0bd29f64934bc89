"""From files to batches: readers, prepare, store, packing, loader."""
