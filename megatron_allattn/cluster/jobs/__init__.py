"""Jobs under SLURM that recover by themselves: what a batch script decides, and its text. Imports no torch."""
