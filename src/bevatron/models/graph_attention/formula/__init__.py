"""A user's own formula: expression, planner, evaluation."""
