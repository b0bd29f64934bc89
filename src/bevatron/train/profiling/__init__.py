"""Where the time and the memory of a run's steps go."""
