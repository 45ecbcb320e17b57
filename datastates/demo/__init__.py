"""``python -m datastates.demo``: a training that is killed in the middle of a checkpoint, and resumes bit for bit."""
