"""What operators share, each thing once."""
