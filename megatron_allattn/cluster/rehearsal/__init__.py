"""The dry run: every rank of a job built and one of its steps rehearsed, in one process and without memory."""
