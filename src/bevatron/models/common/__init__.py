"""What two models share."""
