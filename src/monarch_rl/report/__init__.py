"""What reads a run's folder for its user: the page, conversions for other programs, and the diagnosis."""
