"""What a cluster needs before, around and between runs: plans, rehearsals without it, fit nodes, SLURM jobs."""
