"""Reports and plots."""
