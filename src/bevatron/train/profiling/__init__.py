"""Profiles of the time and memory of training steps."""
