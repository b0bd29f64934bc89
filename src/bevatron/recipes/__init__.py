"""Recipes: functions that return a complete run."""
