"""What a data set contains."""
