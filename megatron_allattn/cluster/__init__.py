"""What is known of a job before it is queued, and what a cluster needs to run it."""
