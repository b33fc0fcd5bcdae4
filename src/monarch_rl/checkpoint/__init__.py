"""A run on disk, so that it can resume: checkpoint folders with checksums, and the journal of its steps."""
